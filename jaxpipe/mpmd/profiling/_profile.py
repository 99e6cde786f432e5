"""Compares a step of all processes with the prediction of its schedule, and names its actions."""

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax

from ... import schedules
from ...schedules import Costs, Op, Timeline
from ...schedules.analysis import TimedStep
from ...schedules.language import actions_of, parse_step
from ..api._stages import Compiled
from ..ir._program import Delete, Instruction, MpmdProgram, Recv, RunTask, Send, name_in_step
from ..runtime._execute import Slots, Thunk
from ..runtime._rendezvous import kv_get, kv_put
from ..runtime._session import open_session
from ._measured import TaskTime, tasks_of_loop, timed_step, to_timeline

SECONDS = 600.0
"""The seconds to wait for the measurements of other processes."""


def annotated(compiled: Compiled) -> Compiled:
    """Returns the same function with a `jax.profiler.TraceAnnotation` around every instruction."""

    def wrap(instruction: Instruction, thunk: Thunk) -> Thunk:
        label = _label(instruction, compiled.lowered.program)

        def run(slots: Slots) -> None:
            with jax.profiler.TraceAnnotation(label):
                thunk(slots)

        return run

    return compiled.with_thunks(wrap)


def _label(instruction: Instruction, program: MpmdProgram) -> str:
    rank = instruction.rank
    match instruction:
        case RunTask():
            return f"{name_in_step(instruction, program)} on rank {rank}"
        case Send(to=to):
            return f"rank {rank} sends to rank {to}"
        case Recv(source=source, name=name):
            return f"rank {rank} receives {name} from rank {source}"
        case Delete():
            return f"rank {rank} deletes"


def trace_step(compiled: Compiled, *args: Any) -> tuple[Any, dict[str, Timeline]]:
    """Runs a step, and returns its measured timelines beside those that its schedules predict.

    Collective: every process must call it. A rank waits for each of its tasks to measure its end.
    If every rank has a process of its own, the times are those of the pipeline. Ranks of the same
    process run their tasks one after another. The clocks of several machines are compared without
    any correction.

    Returns:
        The result of the function; and the timelines `measured` and `predicted` of all ranks, in
        seconds, for `schedules.to_perfetto` and `schedules.bubble_fraction`. The prediction is a
        simulation of the schedule with the median measured time of each kind of action of a stage.
        If the function has several loops, each has its own two timelines, which start with its
        first task: `measured_loop_0`, `predicted_loop_0`, `measured_loop_1`, and so on.

    Raises:
        TimeoutError: If another process has not ended the step within 600 seconds.
    """
    result, times = timed_step(compiled, *args)
    loops = compiled.lowered.schedules
    timelines: dict[str, Timeline] = {}
    for i, schedule in enumerate(loops):
        measured = _measured_by_all(compiled, times, i)
        suffix = f"_loop_{i}" if len(loops) > 1 else ""
        timelines[f"measured{suffix}"] = measured
        timelines[f"predicted{suffix}"] = schedules.simulate(schedule, _costs(measured))
    return result, timelines


def _measured_by_all(compiled: Compiled, times: Sequence[TaskTime], loop: int) -> Timeline:
    """Returns when the tasks of one loop ran on the ranks of all processes."""
    here = to_timeline(compiled, times, loop)
    first = min((time.start for time in tasks_of_loop(times, loop)), default=0.0)
    # The processes of a machine share the clock of `time.time`, but not always `perf_counter`.
    start_time = first + time.time() - time.perf_counter()
    rows = _gather_rows(compiled, here, start_time)
    return Timeline(here.schedule, tuple(map(tuple, rows)))


def _gather_rows(compiled: Compiled, here: Timeline, start_time: float) -> list[list[TimedStep]]:
    """Returns the timed steps of every rank, in seconds from the first task of all processes."""
    own = [[(str(timed.step), timed.start, timed.end) for timed in row] for row in here.rows]
    texts = {jax.process_index(): json.dumps([start_time, own])}
    if jax.process_count() > 1:
        session = open_session(compiled.lowered.traced.settings.timeout)
        what = f"trace/{next(session.programs)}"
        kv_put(what, texts[jax.process_index()])
        texts = kv_get(what, range(jax.process_count()), SECONDS)
        if missing := [p for p in range(jax.process_count()) if p not in texts]:
            raise TimeoutError(f"Processes {missing} have not ended the step within {SECONDS:g} s.")
    of_processes = [json.loads(text) for text in texts.values()]
    zero = min((start_time for start_time, rows in of_processes if any(rows)), default=0.0)
    merged: list[list[TimedStep]] = [[] for _ in here.rows]
    for start_time, rows in of_processes:
        for row, of_rank in zip(merged, rows, strict=True):
            row += [
                TimedStep(parse_step(step), start + start_time - zero, end + start_time - zero)
                for step, start, end in of_rank
            ]
    return merged


def _costs(measured: Timeline) -> Costs:
    """Returns the median seconds of F, I and W of each stage.

    The time of a fused task is divided in the ratio F : B = 1 : 2, and of a B in I : W = 1 : 1.
    """
    seconds_of: defaultdict[tuple[int, Op], list[float]] = defaultdict(list)
    for timed in (timed for row in measured.rows for timed in row):
        actions = actions_of(timed.step)
        weights = [_WEIGHTS[action.op] for action in actions]
        for action, weight in zip(actions, weights, strict=True):
            seconds = float(timed.end - timed.start) * weight / sum(weights)
            for op in (Op.I, Op.W) if action.op is Op.B else (action.op,):
                seconds_of[action.stage, op].append(seconds * _WEIGHTS[op] / weight)
    stages = range(measured.schedule.num_stages)

    def of(op: Op) -> tuple[float, ...]:
        return tuple(statistics.median(seconds_of.get((stage, op), [0.0])) for stage in stages)

    return Costs(of(Op.F), of(Op.I), of(Op.W), atomic_pairs=False)


_WEIGHTS = {Op.F: 1, Op.B: 2, Op.I: 1, Op.W: 1}
