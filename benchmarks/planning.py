"""Measures what planning costs: CPU seconds and memory of the functions of `jaxpipe.schedules`.

    python benchmarks/planning.py [NAME ...]

Prints a row per schedule, or per schedule named: CPU seconds of each function, each a single run,
and the peak memory of the process that ran them all. Every row runs in a process of its own, one
after the other. `*` marks what is over its target. The largest row takes about a minute. `search`
prints the searches of Zero Bubble's profiles, with the published bubbles of ZB-1p and ZB-2p.
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


class SearchRow(NamedTuple):
    """A search of all placements, for steps that follow each other without a barrier.

    Attributes:
        ranks: The number of ranks.
        microbatches: The number of microbatches.
        times: Milliseconds of F, I and W of a rank, and of a transfer.
        published: The bubbles of ZB-1p and ZB-2p (arXiv 2401.10241, table 5), if there are some.
        seconds: The target of a search.
    """

    ranks: int
    microbatches: int
    times: tuple[float, float, float, float]
    published: tuple[float, float] | None
    seconds: float


SEARCHES = (
    SearchRow(8, 24, (18.522, 18.086, 9.337, 0.601), (0.1585, 0.0433), 1),
    SearchRow(8, 32, (18.513, 18.086, 9.331, 0.626), (0.1242, 0.0039), 1),
    SearchRow(8, 64, (18.546, 18.097, 9.321, 0.762), (0.0674, 0.0026), 1),
    SearchRow(16, 48, (11.347, 11.248, 8.132, 0.377), (0.1397, 0.0066), 3),
    SearchRow(16, 64, (11.307, 11.254, 8.101, 0.379), (0.1088, 0.0054), 3),
    SearchRow(16, 128, (11.325, 11.308, 8.109, 0.378), (0.0576, 0.0028), 3),
    SearchRow(32, 128, (10, 12, 8, 0.5), None, 10),
)


class Measured(NamedTuple):
    """The CPU seconds of every step, the actions of the schedule and the peak memory in MB."""

    seconds: dict[str, float]
    num_actions: int
    memory: float


def main() -> None:
    parser = argparse.ArgumentParser()
    names = sorted({row.name for row in ROWS} | {"search"})
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    chosen = parser.parse_args().names
    if unknown := sorted(set(chosen) - set(names)):
        parser.error(f"NAME is {', '.join(unknown)}. Give some of {', '.join(names)}.")

    head = f"{'schedule':<18}{'ranks x M':>12}{'actions':>9}"
    if set(chosen or names) != {"search"}:
        print(head + "".join(f"{step:>11}" for step in STEPS) + f"{'target':>8}{'MB':>7}")
    spawn = multiprocessing.get_context("spawn")
    for row in ROWS:
        if row.name in (chosen or names):
            with spawn.Pool(1) as process:
                print(_line(row, process.apply(_measure, (row,))), flush=True)
    if "search" in (chosen or names):
        _print_searches()


def _print_searches() -> None:
    head = f"\n{'ranks x M':<12}{'cap':>5}  {'found':<26}{'bubble':>8}{'published':>11}"
    print(head + f"{'above bound':>13}{'seconds':>9}{'target':>8}")
    for row in SEARCHES:
        for index, cap in enumerate((row.ranks, 2 * row.ranks)):
            start = time.process_time()
            found = schedules.search(
                row.ranks, row.microbatches, schedules.Costs(*row.times), cap, synchronous=False
            )
            seconds = time.process_time() - start
            bubble = 1 - row.microbatches * sum(row.times[:3]) / found.step_time
            published = f"{row.published[index]:.2%}" if row.published else ""
            chunks = found.schedule.num_stages // row.ranks
            print(
                f"{row.ranks:>3} x {row.microbatches:<6}{cap:>5}  {f'{found.name}, {chunks}':<26}"
                f"{abs(bubble):>8.2%}{published:>11}{found.gap:>13.2%}"
                f"{seconds:>8.2f}{_mark(seconds > row.seconds)}{row.seconds:>8g}",
                flush=True,
            )


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
