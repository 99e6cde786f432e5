"""Measures what planning costs: CPU seconds and memory of the functions of `jaxpipe.schedules`.

    python benchmarks/planning.py [NAME ...]

Prints a row per schedule, or per schedule named: CPU seconds of each function, each a single run,
and the peak memory of the process that ran them all. Every row runs in a process of its own, one
after the other. `*` marks what is over its target. The largest row takes about a minute.
"""

import argparse
import gc
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxpipe import schedules
from jaxpipe.schedules import lock_step

STEPS = ("build", "check", "simulate", "lock_step", "tables")


class Row(NamedTuple):
    """A schedule to plan.

    Attributes:
        name: The name for `schedules.build`.
        ranks: The number of ranks.
        microbatches: The number of microbatches.
        chunks: The stages per rank, or None for the usual number.
        seconds: The target of every step.
    """

    name: str
    ranks: int
    microbatches: int
    chunks: int | None
    seconds: float


MEMORY_MB = 500
ROWS = (
    Row("1f1b", 64, 256, None, 1),
    Row("1f1b", 256, 1024, None, 20),
    Row("interleaved_1f1b", 16, 128, 4, 0.5),
    Row("zero_bubble_h1", 64, 256, None, 3),
    Row("zbv", 64, 256, None, 3),
    Row("v_half", 64, 256, None, 3),
)


class Measured(NamedTuple):
    """The CPU seconds of every step, the actions of the schedule and the peak memory in MB."""

    seconds: dict[str, float]
    num_actions: int
    memory: float


def main() -> None:
    parser = argparse.ArgumentParser()
    names = sorted({row.name for row in ROWS})
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    chosen = parser.parse_args().names
    if unknown := sorted(set(chosen) - set(names)):
        parser.error(f"NAME is {', '.join(unknown)}. Give some of {', '.join(names)}.")

    head = f"{'schedule':<18}{'ranks x M':>12}{'actions':>9}"
    print(head + "".join(f"{step:>11}" for step in STEPS) + f"{'target':>8}{'MB':>7}")
    spawn = multiprocessing.get_context("spawn")
    for row in ROWS:
        if row.name in (chosen or names):
            with spawn.Pool(1) as process:
                print(_line(row, process.apply(_measure, (row,))), flush=True)


def _line(row: Row, measured: Measured) -> str:
    cells = "".join(
        f"{seconds:>10.2f}{_mark(seconds > row.seconds)}" for seconds in measured.seconds.values()
    )
    counts = f"{row.ranks} x {row.microbatches}"
    memory = f"{measured.memory:>6.0f}{_mark(measured.memory > MEMORY_MB)}"
    return f"{row.name:<18}{counts:>12}{measured.num_actions:>9}{cells}{row.seconds:>8g}{memory}"


def _mark(is_over: bool) -> str:
    return "*" if is_over else " "


def _measure(row: Row) -> Measured:
    seconds: dict[str, float] = {}

    def timed(step: str, run: Callable[[], Any]) -> Any:
        gc.collect()
        start = time.process_time()
        result = run()
        seconds[step] = time.process_time() - start
        return result

    counts = {"ranks": row.ranks, "microbatches": row.microbatches, "chunks": row.chunks}
    schedule = timed("build", lambda: schedules.build(row.name, **counts))
    timed("check", lambda: schedules.check(schedule))
    timed("simulate", lambda: schedules.simulate(schedule, schedules.Costs()))
    ticks = timed("lock_step", lambda: lock_step.to_lock_step(schedule))
    timed("tables", lambda: lock_step.tick_tables(ticks))
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
    return Measured(seconds, sum(map(len, schedule.programs)), memory)


if __name__ == "__main__":
    main()
