"""A timeline as a trace for ui.perfetto.dev or chrome://tracing."""

import json
from typing import Any

from ._action import Op, Pair, Step, actions_of
from ._measure import alive
from ._simulate import Time, Timeline

_KINDS = {Op.F: "forward", Op.B: "backward", Op.I: "input gradient", Op.W: "weight gradient"}


def to_trace(timeline: Timeline, microseconds: Time = 1000) -> str:
    """The JSON of a trace: a track of actions per rank, and a counter of live activations.

    Args:
        timeline: What to draw.
        microseconds: What one unit of time is.
    """
    events: list[dict[str, Any]] = []
    for rank, row in enumerate(timeline.rows):
        events.append(_event("M", rank, name="process_name", args={"name": f"rank {rank}"}))
        events.append(_event("M", rank, name="process_sort_index", args={"sort_index": rank}))
        counts = alive(timeline.schedule, rank, [1] * timeline.schedule.num_stages)
        for timed in row:
            start, end = timed.start * microseconds, timed.end * microseconds
            first = actions_of(timed.step)[0]
            details = {"stage": first.stage, "microbatch": first.microbatch}
            events.append(
                _event(
                    "X",
                    rank,
                    name=str(timed.step),
                    cat=_kind(timed.step),
                    ts=start,
                    dur=end - start,
                    args=details,
                )
            )
            for action in actions_of(timed.step):
                now = next(counts)
                at = start if action.op is Op.F else end
                events.append(
                    _event("C", rank, name="live activations", ts=at, args={"count": now})
                )
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, indent=1)


def _event(phase: str, rank: int, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": rank, "tid": 0, **fields}


def _kind(step: Step) -> str:
    return "fused pair" if isinstance(step, Pair) else _KINDS[step.op]
