"""What a step really did: each task one after the other on its rank, with a clock beside it.

A rank waits until its task's inputs are there, runs it, and waits until it is done, as ranks do
that are busy. Where every rank has a process of its own the times are those of the pipeline, plus a
few microseconds a task. Ranks of one process take turns then, so only the lengths say something.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax

from ..schedules import Action, Pair, Step, Timed, Timeline
from ._code import Instruction, Run
from ._compiled import Compiled
from ._execute import Act, Place, Slots

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
    timed = compiled.with_acts(lambda instruction, act: _timed(instruction, act, places, times))
    return timed(*args), times


def _timed(instruction: Instruction, act: Act, places: Mapping[Place, int], times: Times) -> Act:
    if not isinstance(instruction, Run):
        return act
    reads = [places[buffer, instruction.rank] for buffer in instruction.reads]
    writes = [places[buffer, instruction.rank] for buffer in instruction.writes]

    def run(slots: Slots) -> None:
        jax.block_until_ready([slots[place] for place in reads])
        start = time.perf_counter()
        act(slots)
        jax.block_until_ready([slots[place] for place in writes])
        times.append((instruction, start, time.perf_counter()))

    return run


def collect_task_times_ms(compiled: Compiled, *args: Any, repeats: int = 3) -> dict[str, float]:
    """How long each task of this process takes, in milliseconds: the median of some steps.

    Args:
        compiled: A compiled function that donates nothing, so that steps can be repeated.
        args: Its arguments.
        repeats: How many steps.

    Returns:
        By the name of the task, `fwd_2__0`, or `before_loop@1` for rank 1 outside of loops.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        _, times = timed_step(compiled, *args)
        for run, start, end in times:
            name = run.name if run.actions else f"{run.name}@{run.rank}"
            found[name].append(1e3 * (end - start))
    return {name: statistics.median(each) for name, each in found.items()}


def to_timeline(compiled: Compiled, times: Times) -> Timeline:
    """The loop of a step as `schedules.to_trace` and `to_svg` draw it, from its first task on.

    Ranks of other processes are empty.
    """
    schedule = compiled.lowered.schedules[0]
    of_loop = [(run, start, end) for run, start, end in times if run.actions]
    first = min((start for _, start, _ in of_loop), default=0.0)
    rows: list[list[Timed]] = [[] for _ in schedule.programs]
    for run, start, end in of_loop:
        rows[run.rank].append(Timed(_step(run.actions), start - first, end - first))
    return Timeline(schedule, tuple(map(tuple, rows)))


def _step(actions: tuple[Action, ...]) -> Step:
    return actions[0] if len(actions) == 1 else Pair(*actions)
