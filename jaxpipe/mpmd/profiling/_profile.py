"""A step beside what its schedule predicts, over all processes; and its names in a profile."""

import json
import statistics
import time
from collections import defaultdict
from typing import Any

import jax

from ... import schedules
from ...schedules import Costs, Op, TimedStep, Timeline, actions_of, parse_step
from ..api._stages import Compiled
from ..ir._program import Free, Instruction, Receive, Run, Send
from ..runtime._execute import Act, Slots
from ..runtime._remote import ask, tell
from ..runtime._session import open_session
from ._measured import timed_step, to_timeline

SECONDS = 600.0
"""How long to wait for what other processes have measured."""


def annotated(compiled: Compiled) -> Compiled:
    """The same step with the name of every action, its rank and its peer in JAX's profiler."""

    def wrap(instruction: Instruction, act: Act) -> Act:
        label = _label(instruction)

        def run(slots: Slots) -> None:
            with jax.profiler.TraceAnnotation(label):
                act(slots)

        return run

    return compiled.with_acts(wrap)


def _label(instruction: Instruction) -> str:
    rank = instruction.rank
    match instruction:
        case Run(name=name):
            return f"{name} on rank {rank}"
        case Send(to=to):
            return f"rank {rank} sends to rank {to}"
        case Receive(source=source, name=name):
            return f"rank {rank} receives {name} from rank {source}"
        case Free():
            return f"rank {rank} frees"


def trace_step(compiled: Compiled, *args: Any) -> tuple[Any, dict[str, Timeline]]:
    """A step, and what ran when, beside what its first schedule takes with tasks of that length.

    Every process calls it. A rank waits for each of its tasks, so that its end is seen: where every
    rank has a process of its own these are the times of the pipeline; ranks of one process take
    turns. Clocks of several machines are compared as they are.

    Args:
        compiled: A compiled function with a loop.
        args: Its arguments. What it donates is gone.

    Returns:
        Its result; and of all ranks, in seconds, what is `measured` and `predicted`, as
        `schedules.to_perfetto` and `schedules.bubble_fraction` take it.
    """
    result, times = timed_step(compiled, *args)
    schedule = compiled.lowered.schedules[0]
    here = to_timeline(compiled, times)
    first = min((start for run, start, _ in times if run.actions), default=0.0)
    # Processes of a machine share the clock of `time.time`, not always that of `perf_counter`.
    began = first + time.time() - time.perf_counter()
    rows = _of_all_processes(compiled, here, began)
    measured = Timeline(schedule, tuple(map(tuple, rows)))
    predicted = schedules.simulate(schedule, _costs(measured))
    return result, {"measured": measured, "predicted": predicted}


def _of_all_processes(compiled: Compiled, here: Timeline, began: float) -> list[list[TimedStep]]:
    """The rows of all ranks, from the first task of all."""
    told = {jax.process_index(): _told(here, began)}
    if jax.process_count() > 1:
        session = open_session(compiled.lowered.traced.settings.timeout)
        what = f"trace/{next(session.programs)}"
        tell(what, told[jax.process_index()])
        told = ask(what, range(jax.process_count()), SECONDS)
        if late := [p for p in range(jax.process_count()) if p not in told]:
            raise TimeoutError(f"Processes {late} have not ended the step within {SECONDS:g} s.")
    found = [json.loads(text) for text in told.values()]
    zero = min((began for began, rows in found if any(rows)), default=0.0)
    merged: list[list[TimedStep]] = [[] for _ in here.rows]
    for began, rows in found:
        for row, of_rank in zip(merged, rows, strict=True):
            row += [
                TimedStep(parse_step(step), start + began - zero, end + began - zero)
                for step, start, end in of_rank
            ]
    return merged


def _told(here: Timeline, began: float) -> str:
    rows = [[(str(timed.step), timed.start, timed.end) for timed in row] for row in here.rows]
    return json.dumps([began, rows])


def _costs(measured: Timeline) -> Costs:
    """The median of every stage's F, I and W. Of what ran fused, an F is a third."""
    found: defaultdict[tuple[int, Op], list[float]] = defaultdict(list)
    for timed in (timed for row in measured.rows for timed in row):
        actions = actions_of(timed.step)
        weights = [_WEIGHTS[action.op] for action in actions]
        for action, weight in zip(actions, weights, strict=True):
            seconds = float(timed.end - timed.start) * weight / sum(weights)
            for op in (Op.I, Op.W) if action.op is Op.B else (action.op,):
                found[action.stage, op].append(seconds * _WEIGHTS[op] / weight)
    stages = range(measured.schedule.num_stages)

    def of(op: Op) -> tuple[float, ...]:
        return tuple(statistics.median(found.get((stage, op), [0.0])) for stage in stages)

    return Costs(of(Op.F), of(Op.I), of(Op.W), atomic_pairs=False)


_WEIGHTS = {Op.F: 1, Op.B: 2, Op.I: 1, Op.W: 1}
