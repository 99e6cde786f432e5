"""Measures the tasks of a step, and compares the step of all processes with its schedule.

A rank waits until the inputs of a task are computed, starts its clock, runs the task and waits
until the task has ended. If every rank has a process of its own, the times are those of the
pipeline, plus a few microseconds per task. Ranks of the same process run their tasks one after
another while they are measured, so only the durations are meaningful.
"""

import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax

from ... import schedules
from ...schedules import Costs, FusedPair, Op, Timeline
from ...schedules.analysis import TimedStep
from ...schedules.language import actions_of, parse_step
from ..api._stages import OBSERVER, Compiled
from ..ir._program import (
    Delete,
    Instruction,
    MpmdProgram,
    RankBuffer,
    Recv,
    RunTask,
    Send,
    name_in_step,
)
from ..runtime._execute import Slots, Thunk
from ..runtime._rendezvous import kv_get, kv_put
from ..runtime._session import open_session

SECONDS = 600.0
"""The seconds to wait for the measurements of other processes."""


class TaskTime(NamedTuple):
    """When a task ran, in seconds of `time.perf_counter`."""

    run: RunTask
    start: float
    end: float


def timed_step(compiled: Compiled, *args: Any) -> tuple[Any, list[TaskTime]]:
    """Runs a step; returns its results, and when each program of this process ran, in seconds."""
    times: list[TaskTime] = []
    slot_of = compiled.slot_of
    timed = compiled.with_thunks(
        lambda instruction, thunk: _timed(instruction, thunk, slot_of, times.append)
    )
    return timed(*args), times


def _timed(
    instruction: Instruction,
    thunk: Thunk,
    slot_of: Mapping[RankBuffer, int],
    record: Callable[[TaskTime], None],
) -> Thunk:
    if not isinstance(instruction, RunTask):
        return thunk
    reads = [slot_of[buffer, instruction.rank] for buffer in instruction.reads]
    writes = [slot_of[buffer, instruction.rank] for buffer in instruction.writes]

    def run(slots: Slots) -> None:
        jax.block_until_ready([slots[slot] for slot in reads])
        start = time.perf_counter()
        thunk(slots)
        jax.block_until_ready([slots[slot] for slot in writes])
        record(TaskTime(instruction, start, time.perf_counter()))

    return run


def collect_task_times_ms(
    compiled: Compiled | bool = True, *args: Any, repeats: int = 3, enabled: bool = True
) -> Any:
    """Measures the duration of each task of this process, in milliseconds.

    Given a compiled function and its arguments, it runs `repeats` steps. Without these it returns a
    context manager, like JaxPP's function, that measures all steps called inside it:

        with collect_task_times_ms() as times:
            step(*args)

    Args:
        compiled: A compiled function without donated arguments, so that steps can be repeated. To
            get a context manager: a bool, which enables measurement as `enabled` does.
        *args: The arguments of the compiled function.
        repeats: The number of steps.
        enabled: Whether the context manager measures.

    Returns:
        Given a function: a dict with the median milliseconds of each task by its name, such as
        `fwd_2__0`, or `before_loop@1` for rank 1 outside of loops. Otherwise a context manager. It
        yields a dict that maps the name of a task without its microbatch, such as `fwd_2`, to a
        list of milliseconds, one entry for each microbatch and step; or None if not enabled. If the
        function has several loops, the name of a task begins with its loop: `loop_1.fwd_2`.
    """
    if isinstance(compiled, bool):
        return _collecting(compiled and enabled)
    times_by_name: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        _, times = timed_step(compiled, *args)
        for run, start, end in times:
            times_by_name[_name(run, compiled)].append(1e3 * (end - start))
    return {name: statistics.median(each) for name, each in times_by_name.items()}


@contextmanager
def _collecting(enabled: bool) -> Iterator[dict[str, list[float]] | None]:
    if not enabled:
        yield None
        return
    times: dict[str, list[float]] = {}

    def observe(compiled: Compiled) -> list[Thunk]:
        def record(time: TaskTime) -> None:
            name = _name(time.run, compiled)
            name = re.sub(r"__\d+(s\d+)?", "", name) if time.run.actions else name
            times.setdefault(name, []).append(1e3 * (time.end - time.start))

        return [_timed(i, thunk, compiled.slot_of, record) for i, thunk in compiled.thunks]

    token = OBSERVER.set(observe)
    try:
        yield times
    finally:
        OBSERVER.reset(token)


def _name(run: RunTask, compiled: Compiled) -> str:
    """Returns the name of a task, with its rank if it is no action of a schedule."""
    name = name_in_step(run, compiled.lowered.program)
    return name if run.actions else f"{name}@{run.rank}"


def to_timeline(compiled: Compiled, times: Sequence[TaskTime], loop: int = 0) -> Timeline:
    """Returns one loop of a step as a timeline for `schedules.to_perfetto` and `to_svg`."""
    schedules = compiled.lowered.schedules
    if not 0 <= loop < len(schedules):
        raise ValueError(
            f"`loop` is {loop}, and the function has {len(schedules)} loops. Give an index from 0 "
            f"to {len(schedules) - 1}."
            if schedules
            else "The function has no loop over microbatches, so it has no timeline."
        )
    of_loop = _tasks_of_loop(times, loop)
    first = min((time.start for time in of_loop), default=0.0)
    rows: list[list[TimedStep]] = [[] for _ in schedules[loop].programs]
    for run, start, end in of_loop:
        step = run.actions[0] if len(run.actions) == 1 else FusedPair(*run.actions)
        rows[run.rank].append(TimedStep(step, start - first, end - first))
    return Timeline(schedules[loop], tuple(map(tuple, rows)))


def _tasks_of_loop(times: Sequence[TaskTime], loop: int) -> list[TaskTime]:
    """Returns when the actions of the schedule of one loop ran, by the index of the loop."""
    return [time for time in times if time.run.loop == loop and time.run.actions]


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
    first = min((time.start for time in _tasks_of_loop(times, loop)), default=0.0)
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
