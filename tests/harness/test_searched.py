"""Schedules that the search finds within caps of memory equal the unpipelined program."""

import functools
from typing import Any, NamedTuple

import pytest

from harness.contract import Row, check_result, make_case, run_mpmd, run_ticks
from jaxpipe.schedules import Costs, Schedule, peak_activations, search
from jaxpipe.schedules.analysis.search import ActivationMemory, rank_of_each_stage
from jaxpipe.schedules.lock_step import to_lock_step

WHOLE, SPLIT = (4, 8, 0), (4, 5, 3)
"""Costs of F, I and W of a stage. Without W the search may still leave it for later."""


class Searched(NamedTuple):
    """A search of a placement, and the engine that runs what it finds.

    With `uneven` all stages have costs and bytes of their own, of which an I frees a part, and the
    ranks have caps of their own.
    """

    engine: str
    ranks: int
    chunks: int
    placement: str
    cap: int
    costs: tuple[int, int, int] = SPLIT
    uneven: bool = False
    remat: str = "none"

    def __str__(self) -> str:
        sizes = f"S{self.ranks}-{self.placement}{self.chunks}-cap{self.cap}"
        kinds = "split" if self.costs == SPLIT else "whole", "uneven" if self.uneven else "even"
        return "-".join([self.engine, sizes, *kinds, self.remat])

    @property
    def microbatches(self) -> int:
        return 16 if self.ranks == 8 else 12

    @property
    def schedule(self) -> Schedule:
        rank_of = rank_of_each_stage(self.placement, self.ranks, self.chunks)
        find = functools.partial(search, self.ranks, self.microbatches, placement=rank_of)
        most = self.cap * self.chunks
        if not self.uneven:
            forward, backward, weight = self.costs
            return find(Costs(forward, backward, weight), most).schedule
        stages = range(len(rank_of))
        forward, backward, weight = (tuple(c + s % 3 for s in stages) for c in self.costs)
        memory = ActivationMemory(
            tuple(6 + s % 3 for s in stages), tuple(2 + s % 2 for s in stages)
        )
        caps = tuple(8 * most + rank % 2 for rank in range(self.ranks))
        return find(Costs(forward, backward, weight), caps, memory=memory).schedule


def check_searched(one: Searched) -> None:
    schedule = one.schedule
    row = Row(
        one.engine, "mlp", one.ranks, one.chunks, one.microbatches, tied=True, dropout=0.1,
        remat=one.remat, axes=() if one.engine == "mpmd" else None,
    )  # fmt: skip
    case = make_case(row)
    if one.engine == "mpmd":
        check_result(row, run_mpmd(row, case, schedule))
        return
    most = max(peak_activations(schedule)) if one.uneven else one.cap * one.chunks
    forward, backward, weight = one.costs
    ticks = to_lock_step(schedule, Costs(forward, backward, weight), memory_cap=most)
    assert max(peak_activations(ticks.schedule)) <= most
    check_result(row, run_ticks(row, case, ticks))


FEW = [
    Searched("scheduled", 2, 2, "v", 1),
    Searched("scheduled", 4, 1, "straight", 3, uneven=True),
    Searched("scheduled", 3, 2, "loop", 2, WHOLE, remat="full"),
    Searched("mpmd", 3, 2, "v", 2, uneven=True),
]


def grid() -> list[Any]:
    """Every engine x ranks x placement x caps from the least to two for each rank."""
    rows = [
        Searched(engine, ranks, chunks, placement, cap, costs, uneven, remat)
        for engine in ("scheduled", "mpmd")
        for ranks in (2, 4, 8)
        for placement, chunks in (("straight", 1), ("loop", 2), ("v", 2), ("v", 4))
        for cap in sorted({1, ranks // 2, ranks - 1, ranks, 2 * ranks})
        for costs, uneven, remat in (
            (SPLIT, False, "full"),
            (SPLIT, True, "none"),
            (WHOLE, False, "none"),
        )
    ]
    return [pytest.param(row, marks=pytest.mark.slow) for row in rows if row not in FEW]


@pytest.mark.parametrize("one", [*FEW, *grid()], ids=str)
def test_what_the_search_finds_equals_the_unpipelined_program(one: Searched):
    check_searched(one)
