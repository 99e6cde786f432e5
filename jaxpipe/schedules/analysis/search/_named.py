"""The named families as candidates: each with its arguments, and a bound that often spares it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from ...builders._registry import FAMILIES, build
from ...language._placement import rank_of_each_stage
from ...language._schedule import Schedule
from .._measure import busy_times, makespan, parallelogram_bubble
from .._simulate import Costs, Time, simulate
from ._bounds import lower_bound
from ._fill import run_words
from ._problem import Problem, words_of

Arguments = tuple[tuple[str, int], ...]

_MANY_GROUPS = 1 << 8


@dataclass(frozen=True)
class Named:
    """A family with its arguments, by which `build` makes its schedule.

    Attributes:
        rank_of: The placement; None if a stage is on two ranks or microbatches are sliced.
    """

    name: str
    arguments: Arguments
    rank_of: tuple[int, ...] | None


def named_candidates(
    ranks: int,
    microbatches: int,
    names: Iterable[str] | None = None,
    *,
    max_chunks: int = 4,
    max_slices: int = 1,
    usual_groups: bool = False,
) -> Iterator[Named]:
    """Yields families, by default all, with the arguments that are worth a try.

    With `usual_groups`, groups are the family's own; for a large problem all but three are left
    out.
    """
    for name in FAMILIES if names is None else names:
        family = FAMILIES[name]
        takes, placed_by = family.takes, family.placement
        if "slices" in takes:
            yield from (Named(name, (("slices", s),), None) for s in range(1, max_slices + 1))
        elif "chunks" in takes:
            has_groups = "group" in takes and not usual_groups
            for chunks in range(2, max_chunks + 1):  # one chunk is another family
                rank_of = rank_of_each_stage(placed_by, ranks, chunks)
                for group in _groups(ranks, microbatches) if has_groups else (None,):
                    of_group = () if group is None else (("group", group),)
                    yield Named(name, (("chunks", chunks), *of_group), rank_of)
        elif placed_by == "both_ways":
            if max_chunks >= 2:  # two copies of a stage take the memory of two chunks
                yield Named(name, (), None)
        elif family.default_chunks <= max_chunks:
            rank_of = rank_of_each_stage(placed_by, ranks, family.default_chunks)
            if "spare" in takes:
                yield from (Named(name, (("spare", spare),), rank_of) for spare in (0, 1))
            else:
                yield Named(name, (), rank_of)


def _groups(ranks: int, microbatches: int) -> list[int]:
    """Returns group sizes: all legal ones of a small problem."""
    if ranks * microbatches > _MANY_GROUPS:
        even = microbatches // max(1, microbatches // ranks)
        return sorted({(ranks + 1) // 2, ranks, even})
    sizes = range((ranks + 1) // 2, microbatches + 1)
    return [size for size in sizes if size <= ranks or microbatches % size == 0]


@lru_cache(maxsize=8)
def build_named(named: Named, ranks: int, microbatches: int) -> Schedule | None:
    """Returns the schedule of a family; None if these counts are not for it."""
    try:
        return build(named.name, ranks=ranks, microbatches=microbatches, **dict(named.arguments))
    except ValueError:
        return None


def named_bound(named: Named, problem: Problem) -> Time:
    """Returns a lower bound of a family whose placement is that of a problem."""
    return lower_bound(_as_named(named, problem))


def named_time(named: Named, schedule: Schedule, problem: Problem, costs: Costs) -> Time:
    """Returns the objective of a family's schedule."""
    if named.rank_of is not None and not FAMILIES[named.name].fuses_pairs:
        return run_words(_as_named(named, problem), words_of(schedule))
    timeline = simulate(schedule, costs)
    if problem.synchronous:
        return makespan(timeline)
    return parallelogram_bubble(timeline) + max(busy_times(timeline))


def _as_named(named: Named, problem: Problem) -> Problem:
    """Returns a problem; with whole backwards, if a family has them: with W's that take no time."""
    if FAMILIES[named.name].splits_backward:
        return problem
    f, i, w = problem.times
    whole = tuple(a + b for a, b in zip(i, w, strict=True))
    times = (f, whole, tuple(0 * time for time in w))
    return replace(problem, times=times, kept=problem.stored)
