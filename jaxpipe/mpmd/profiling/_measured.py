"""What a step really did: each task one after the other on its rank, with a clock beside it.

A rank waits until its task's inputs are there, runs it, and waits until it is done, as ranks do
that are busy. Where every rank has a process of its own the times are those of the pipeline, plus a
few microseconds a task. Ranks of one process take turns then, so only the lengths say something.
"""

import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from ...schedules import Action, FusedPair, ScheduleStep, TimedStep, Timeline
from ..api._stages import OBSERVER, Compiled
from ..ir._program import Instruction, Run
from ..runtime._execute import Act, Place, Slots

Times = list[tuple[Run, float, float]]
"""Programs with their start and end, in seconds."""


def timed_step(compiled: Compiled, *args: Any) -> tuple[Any, Times]:
    """A step, and when each program of this process ran.

    Args:
        compiled: A compiled function.
        args: Its arguments. What it donates is gone.
    """
    times: Times = []
    places = compiled.places

    def record(*time: Any) -> None:
        times.append(time)

    timed = compiled.with_acts(lambda instruction, act: _timed(instruction, act, places, record))
    return timed(*args), times


def _timed(
    instruction: Instruction,
    act: Act,
    places: Mapping[Place, int],
    record: Callable[[Run, float, float], None],
) -> Act:
    if not isinstance(instruction, Run):
        return act
    reads = [places[buffer, instruction.rank] for buffer in instruction.reads]
    writes = [places[buffer, instruction.rank] for buffer in instruction.writes]

    def run(slots: Slots) -> None:
        jax.block_until_ready([slots[place] for place in reads])
        start = time.perf_counter()
        act(slots)
        jax.block_until_ready([slots[place] for place in writes])
        record(instruction, start, time.perf_counter())

    return run


def collect_task_times_ms(
    compiled: Compiled | bool = True, *args: Any, repeats: int = 3, enabled: bool = True
) -> Any:
    """Measures how long each task of this process takes, in milliseconds.

    With a compiled function and its arguments it runs some steps. Without these it returns a
    context manager, as JaxPP's does, that measures all steps called inside it:

        with collect_task_times_ms() as times:
            step(*args)

    Args:
        compiled: A compiled function that donates nothing, so that steps can be repeated. For a
            context this is a bool in place of `enabled`.
        args: The arguments of the function.
        repeats: How many steps are run.
        enabled: Whether the context measures.

    Returns:
        With a function: the median time of each task by its name, such as `fwd_2__0`, or
        `before_loop@1` for rank 1 outside of loops. The context yields a list of times in
        milliseconds for each task, one entry for each microbatch and step, by the name without the
        microbatch, such as `fwd_2`; None if it is not enabled.
    """
    if isinstance(compiled, bool):
        return _collecting(compiled and enabled)
    found: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        _, times = timed_step(compiled, *args)
        for run, start, end in times:
            name = run.name if run.actions else f"{run.name}@{run.rank}"
            found[name].append(1e3 * (end - start))
    return {name: statistics.median(each) for name, each in found.items()}


@contextmanager
def _collecting(enabled: bool) -> Iterator[dict[str, list[float]] | None]:
    if not enabled:
        yield None
        return
    found: dict[str, list[float]] = {}

    def record(run: Run, start: float, end: float) -> None:
        name = re.sub(r"__\d+", "", run.name) if run.actions else f"{run.name}@{run.rank}"
        found.setdefault(name, []).append(1e3 * (end - start))

    def observe(compiled: Compiled) -> list[Act]:
        return [_timed(i, act, compiled.places, record) for i, act in compiled.acts]

    token = OBSERVER.set(observe)
    try:
        yield found
    finally:
        OBSERVER.reset(token)


def to_timeline(compiled: Compiled, times: Times) -> Timeline:
    """The loop of a step as `schedules.to_perfetto` and `to_svg` draw it, from its first task on.

    Ranks of other processes are empty.
    """
    schedule = compiled.lowered.schedules[0]
    of_loop = [(run, start, end) for run, start, end in times if run.actions]
    first = min((start for _, start, _ in of_loop), default=0.0)
    rows: list[list[TimedStep]] = [[] for _ in schedule.programs]
    for run, start, end in of_loop:
        rows[run.rank].append(TimedStep(_step(run.actions), start - first, end - first))
    return Timeline(schedule, tuple(map(tuple, rows)))


def _step(actions: tuple[Action, ...]) -> ScheduleStep:
    return actions[0] if len(actions) == 1 else FusedPair(*actions)
