"""The fastest schedule that fits: every named family, and a greedy list scheduler.

Families cut the model into different numbers of stages. To compare them, costs here are those of a
whole rank's share of the model, and a stage has `ranks / num_stages` of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor

from ..builders._registry import FAMILIES, build
from ..builders._require import require, require_positive
from ..language._schedule import Schedule, num_slices
from ._greedy import greedy_schedule
from ._measure import makespan, peak_activations
from ._simulate import Costs, Time, check_costs, simulate


@dataclass(frozen=True)
class Candidate:
    """A schedule with its name, its arguments for `build` (none if greedy) and its figures.

    `makespan` is in the unit of the costs; `peak` is the fullest rank's, in microbatches of a whole
    rank's activations.
    """

    name: str
    arguments: tuple[tuple[str, int], ...]
    schedule: Schedule
    makespan: Time
    peak: Fraction


def search(
    ranks: int,
    microbatches: int,
    costs: Costs,
    memory_cap: Time,
    *,
    max_chunks: int = 4,
    max_slices: int = 1,
) -> Candidate:
    """Returns the schedule with the least makespan within a cap of memory, then the least memory.

    Args:
        ranks: Devices, or groups of devices.
        microbatches: Pieces of the batch.
        costs: Costs of a whole rank, one number each: with v chunks a stage costs 1/v of them.
        memory_cap: The most microbatches that a rank may hold, in units of a whole rank's
            activations.
        max_chunks: The most stages per rank to try.
        max_slices: The most sequence slices to try; more than 1 needs causal attention.

    Returns:
        The schedule with its name, arguments and figures.

    Raises:
        ValueError: If no schedule fits, naming the least memory that any schedule needs.

    Example:
        >>> found = search(2, 4, Costs(), memory_cap=2)
        >>> found.peak <= 2
        True
    """
    require_positive(
        ranks=ranks, microbatches=microbatches, max_chunks=max_chunks, max_slices=max_slices
    )
    check_costs(costs, ranks)
    for name in ("forward", "input", "weight"):
        require(
            not isinstance(getattr(costs, name), tuple),
            f"`{name}` is one cost per stage, but families have different numbers of stages.",
            "Give one number, of a whole rank.",
        )
    named = _named(ranks, microbatches, max_chunks, max_slices)
    found = [_measured(*name_and_schedule, costs, ranks) for name_and_schedule in named]
    for most_alive in range(1, max(1, floor(min(memory_cap, microbatches))) + 1):
        schedule = greedy_schedule(ranks, microbatches, costs, most_alive)
        found.append(_measured("greedy", (), schedule, costs, ranks))
    fitting = [candidate for candidate in found if candidate.peak <= memory_cap]
    least = min(candidate.peak for candidate in found)
    require(
        bool(fitting),
        f"`memory_cap` is {memory_cap}, and the leanest schedule tried holds {float(least):g} "
        "microbatches.",
        f"Give at least {float(least):g}, smaller microbatches, or rematerialise.",
    )
    return min(fitting, key=lambda candidate: (candidate.makespan, candidate.peak))


def _named(
    ranks: int, microbatches: int, max_chunks: int, max_slices: int
) -> Iterator[tuple[str, tuple[tuple[str, int], ...], Schedule]]:
    """Yields every family with every combination of arguments that is legal here."""
    for name, family in FAMILIES.items():
        for arguments in _arguments(family.takes, ranks, microbatches, max_chunks, max_slices):
            try:
                schedule = build(name, ranks=ranks, microbatches=microbatches, **dict(arguments))
            except ValueError:
                continue  # these counts are not for this family
            if num_slices(schedule) <= max_slices:
                yield name, arguments, schedule


def _arguments(
    takes: tuple[str, ...], ranks: int, microbatches: int, max_chunks: int, max_slices: int
) -> Iterator[tuple[tuple[str, int], ...]]:
    if "slices" in takes:
        yield from ((("slices", s),) for s in range(1, max_slices + 1))
    elif "chunks" in takes:
        for chunks in range(2, max_chunks + 1):  # one chunk is another family
            if "group" not in takes:
                yield (("chunks", chunks),)
                continue
            for group in range((ranks + 1) // 2, microbatches + 1):
                if group <= ranks or microbatches % group == 0:
                    yield ("chunks", chunks), ("group", group)
    elif "spare" in takes:
        yield from ((("spare", spare),) for spare in (0, 1))
    else:
        yield ()


def _measured(
    name: str,
    arguments: tuple[tuple[str, int], ...],
    schedule: Schedule,
    costs: Costs,
    ranks: int,
) -> Candidate:
    # A rank's share of the model is divided into so many pieces. Time is counted in that fraction
    # of the unit of the costs: integers stay exact, so that equal makespans compare equal.
    pieces = schedule.num_stages * num_slices(schedule) // ranks
    timeline = simulate(schedule, replace(costs, transfer=costs.transfer * pieces))
    return Candidate(
        name,
        arguments,
        schedule,
        makespan(timeline) / pieces,
        Fraction(max(peak_activations(schedule)), pieces),
    )
