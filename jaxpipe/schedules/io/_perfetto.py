"""A timeline as a trace for ui.perfetto.dev or chrome://tracing."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ..analysis._simulate import Time, Timeline
from ..language._action import FusedPair, Op, actions_of

_KINDS = {Op.F: "forward", Op.B: "backward", Op.I: "input gradient", Op.W: "weight gradient"}


def to_perfetto(timelines: Timeline | Mapping[str, Timeline], microseconds: Time = 1000) -> str:
    """Returns a trace in JSON: a track of actions per rank, and a counter of live activations.

    Args:
        timelines: A timeline; or several, by name, drawn beside each other rank by rank.
        microseconds: The length of one unit of time, in microseconds.

    Returns:
        The text of a file for ui.perfetto.dev or chrome://tracing.

    Example:
        >>> from jaxpipe.schedules import Costs, build, simulate
        >>> timeline = simulate(build("1f1b", ranks=2, microbatches=1), Costs())
        >>> trace = json.loads(to_perfetto(timeline))
        >>> [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
        ['0F0', '0B0', '1F0', '1B0']
    """
    named = {"": timelines} if isinstance(timelines, Timeline) else timelines
    events: list[dict[str, Any]] = []
    for number, (name, timeline) in enumerate(named.items()):
        for rank in range(len(timeline.rows)):
            title = f"rank {rank}, {name}" if name else f"rank {rank}"
            events += _rank_events(timeline, rank, title, rank * len(named) + number, microseconds)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, indent=1)


def _rank_events(
    timeline: Timeline, rank: int, title: str, process: int, microseconds: Time
) -> Iterator[dict[str, Any]]:
    """Yields the events of one row, as a process of the trace."""
    yield _event("M", process, name="process_name", args={"name": title})
    yield _event("M", process, name="process_sort_index", args={"sort_index": process})
    alive = 0
    for timed in timeline.rows[rank]:
        start, end = timed.start * microseconds, timed.end * microseconds
        first = actions_of(timed.step)[0]
        yield _event(
            "X",
            process,
            name=str(timed.step),
            cat="fused pair" if isinstance(timed.step, FusedPair) else _KINDS[timed.step.op],
            ts=start,
            dur=end - start,
            args={"stage": first.stage, "microbatch": first.microbatch},
        )
        for action in actions_of(timed.step):
            at = start if action.op is Op.F else end
            alive += {Op.F: 1, Op.I: 0}.get(action.op, -1)
            yield _event("C", process, name="live activations", ts=at, args={"count": alive})


def _event(phase: str, rank: int, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": rank, "tid": 0, **fields}
