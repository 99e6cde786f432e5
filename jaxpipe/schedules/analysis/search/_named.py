"""The named families as candidates: each with its arguments, and a bound that often spares it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...builders._registry import FAMILIES, build
from ...language._schedule import Schedule
from .._simulate import Time
from ._bounds import lower_bound
from ._placements import rank_of_each_stage
from ._problem import Problem

Arguments = tuple[tuple[str, int], ...]

_UNSPLIT = (
    "gpipe",
    "1f1b",
    "eager_1f1b",
    "interleaved_1f1b",
    "kimi_k2",
    "looped_bfs",
    "interleaved_gpipe",
    "grouped_interleaved",
    "circular",
)
"""Families with whole backwards, each stage on one rank."""

_IN_A_V = ("zbv", "v_half", "v_min", "dualpipev")
_ON_TWO_RANKS = ("dualpipe",)

_MANY_GROUPS = 1 << 8


@dataclass(frozen=True)
class Named:
    """A family with its arguments, by which `build` makes its schedule.

    Attributes:
        name: The name of the family.
        arguments: What `build` takes beyond ranks and microbatches.
        rank_of: The placement; None if a stage is on two ranks or microbatches are sliced.
    """

    name: str
    arguments: Arguments
    rank_of: tuple[int, ...] | None


def named_candidates(
    ranks: int, microbatches: int, max_chunks: int, max_slices: int
) -> Iterator[Named]:
    """Yields every family with the arguments that are worth a try.

    For a few ranks and microbatches these are all groups, otherwise the family's own and the
    ranks.
    """
    straight = rank_of_each_stage("straight", ranks)
    for name, family in FAMILIES.items():
        takes = family.takes
        if "slices" in takes:
            yield from (Named(name, (("slices", s),), None) for s in range(1, max_slices + 1))
        elif "chunks" in takes:
            for chunks in range(2, max_chunks + 1):  # one chunk is another family
                loop = rank_of_each_stage("loop", ranks, chunks)
                for group in _groups(ranks, microbatches) if "group" in takes else (None,):
                    of_group = () if group is None else (("group", group),)
                    yield Named(name, (("chunks", chunks), *of_group), loop)
        elif "spare" in takes:
            yield from (Named(name, (("spare", spare),), straight) for spare in (0, 1))
        elif name in _IN_A_V:
            yield Named(name, (), rank_of_each_stage("v", ranks, 2))
        else:
            yield Named(name, (), None if name in _ON_TWO_RANKS else straight)


def _groups(ranks: int, microbatches: int) -> list[int]:
    """Returns group sizes: all legal ones of a small problem."""
    if ranks * microbatches > _MANY_GROUPS:
        even = microbatches // max(1, microbatches // ranks)
        return sorted({(ranks + 1) // 2, ranks, even})
    sizes = range((ranks + 1) // 2, microbatches + 1)
    return [size for size in sizes if size <= ranks or microbatches % size == 0]


def build_named(named: Named, ranks: int, microbatches: int) -> Schedule | None:
    """Returns the schedule of a family; None if these counts are not for it."""
    try:
        return build(named.name, ranks=ranks, microbatches=microbatches, **dict(named.arguments))
    except ValueError:
        return None


def named_bound(named: Named, problem: Problem) -> Time:
    """Returns a lower bound of a family whose placement is that of a problem.

    Args:
        named: The family.
        problem: The problem of its placement.

    Returns:
        The bound: of whole backwards, if the family does not split them.
    """
    if named.name not in _UNSPLIT:
        return lower_bound(problem)
    f, i, w = problem.times
    whole = tuple(a + b for a, b in zip(i, w, strict=True))
    times = (f, whole, tuple(0 * time for time in w))
    return lower_bound(replace(problem, times=times, kept=problem.stored))
