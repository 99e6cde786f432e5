"""Measures when each task of a step starts and ends.

A rank waits until the inputs of a task are computed, starts its clock, runs the task and waits
until the task has ended. If every rank has a process of its own, the times are those of the
pipeline, plus a few microseconds per task. Ranks of the same process run their tasks one after
another while they are measured, so only the durations are meaningful.
"""

import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax

from ...schedules import FusedPair, Timeline
from ...schedules.analysis import TimedStep
from ..api._stages import OBSERVER, Compiled
from ..ir._program import Instruction, RankBuffer, RunTask, name_in_step
from ..runtime._execute import Slots, Thunk


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
    of_loop = tasks_of_loop(times, loop)
    first = min((time.start for time in of_loop), default=0.0)
    rows: list[list[TimedStep]] = [[] for _ in schedules[loop].programs]
    for run, start, end in of_loop:
        step = run.actions[0] if len(run.actions) == 1 else FusedPair(*run.actions)
        rows[run.rank].append(TimedStep(step, start - first, end - first))
    return Timeline(schedules[loop], tuple(map(tuple, rows)))


def tasks_of_loop(times: Sequence[TaskTime], loop: int) -> list[TaskTime]:
    """Returns when the actions of the schedule of one loop ran, by the index of the loop."""
    return [time for time in times if time.run.loop == loop and time.run.actions]
