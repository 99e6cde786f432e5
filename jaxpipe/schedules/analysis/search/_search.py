"""The fastest schedule that fits, and a time that no schedule can beat.

Families cut the model into different numbers of stages. To compare them, costs and bytes are those
of a whole rank's share of the model unless a placement is given: a stage has `ranks / num_stages`
of it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from ...builders._require import require, require_positive
from ...language._check import check
from ...language._schedule import Schedule, num_slices
from .._measure import busy_times, makespan, parallelogram_bubble
from .._simulate import Costs, PerStage, Time, check_costs, simulate
from ._bounds import lower_bound
from ._named import Named, build_named, named_bound, named_candidates
from ._placements import usual_placements
from ._problem import Problem, peak_bytes, stage_costs, to_schedule, words_of
from ._solve import ROUNDING, Budget, is_enough, solve

SEARCHED = "searched"
"""The name of a schedule that is of no family."""

_BASE_ACTIONS, _RUNS = 300_000, 60


@dataclass(frozen=True)
class ActivationMemory:
    """The bytes of one microbatch, one number or one per stage, in the unit of the cap.

    Attributes:
        stored: The bytes that an F stores.
        kept: Those of them that stay until the W; the I frees the others. A B frees all.
    """

    stored: PerStage = 1
    kept: PerStage = 1


@dataclass(frozen=True)
class Candidate:
    """A schedule with its name, its arguments for `build` (none if searched) and its figures.

    Attributes:
        name: The name of a family, or `searched`.
        arguments: What `build` takes beyond ranks and microbatches.
        schedule: The schedule.
        makespan: The time from the start to the end, in the unit of the costs.
        peak: The bytes of the fullest rank; by default in microbatches of a whole rank.
        step_time: What the search has minimised: the makespan, or the longest span of a rank.
        bound: A time that no order of any placement that was tried is faster than.
    """

    name: str
    arguments: tuple[tuple[str, int], ...]
    schedule: Schedule
    makespan: Time
    peak: Time | Fraction
    step_time: Time
    bound: Time

    @property
    def gap(self) -> float:
        """How far the step time is above the bound, as a fraction of the bound."""
        return max(0.0, float(self.step_time / self.bound - 1)) if self.bound else 0.0


def search(
    ranks: int,
    microbatches: int,
    costs: Costs,
    memory_cap: Time | Sequence[Time],
    *,
    max_chunks: int = 4,
    max_slices: int = 1,
    placement: Sequence[int] | None = None,
    memory: ActivationMemory | None = None,
    synchronous: bool = True,
) -> Candidate:
    """Returns the schedule with the least step time within a cap of memory, then the least memory.

    Tries every named family, and searches the orders of every placement: straight, loops, a V and a
    W. The same arguments give the same schedule.

    Args:
        ranks: Devices, or groups of devices.
        microbatches: Pieces of the batch.
        costs: Costs of a whole rank, one number each: with v chunks a stage costs 1/v of them. With
            a `placement`, costs of a stage, one number or one per stage.
        memory_cap: The most that a rank may store, or [ranks] that of every rank; in the unit of
            `memory`. By default that unit is one microbatch's activations of a whole rank.
        max_chunks: The most stages per rank to try.
        max_slices: The most sequence slices to try; more than 1 needs causal attention.
        placement: [num_stages] the rank of every stage, if no other placement shall be tried.
        memory: Bytes of a microbatch on a whole rank; with a `placement`, on a stage. Integers are
            counted exactly. None: 1, until the W.
        synchronous: Whether the ranks wait for each other between steps. If not, a step takes as
            long as the longest span of a rank, from its first start to its last end.

    Returns:
        The schedule with its name, arguments and figures.

    Raises:
        ValueError: If no schedule fits, naming the least memory that any schedule needs; or if an
            argument is out of range.

    Example:
        >>> found = search(2, 4, Costs(), memory_cap=2)
        >>> found.peak <= 2, found.makespan, found.gap
        (True, 13, 0.0)
    """
    require_positive(
        ranks=ranks, microbatches=microbatches, max_chunks=max_chunks, max_slices=max_slices
    )
    costs, memory, caps = _checked(ranks, costs, memory, memory_cap, placement)
    tried = usual_placements(ranks, max_chunks) if placement is None else [tuple(placement)]
    settings = [
        _Setting(_problem(rank_of, microbatches, costs, memory, caps, synchronous, pieces), pieces)
        for rank_of in tried
        for pieces in [len(rank_of) // ranks if placement is None else 1]
    ]
    named = list(named_candidates(ranks, microbatches, max_chunks, max_slices))
    best = _best_order([setting for setting in settings if setting.fits])
    if placement is not None:
        named = [one for one in named if one.rank_of == settings[0].problem.rank_of]
    best = _best_named(named, settings, costs, best)
    require(best is not None, *_too_small(memory_cap, settings))
    assert best is not None
    bounds = [setting.bound for setting in settings if setting.fits]
    return replace(best, bound=min([best.step_time, *bounds]))


@dataclass(frozen=True)
class _Setting:
    """A problem whose times and bytes are in a fraction of the caller's units: 1 / `pieces`.

    Integers so stay exact, and equal times compare equal.
    """

    problem: Problem
    pieces: int

    @property
    def fits(self) -> bool:
        """Whether every rank can store a microbatch."""
        return all(a <= b for a, b in zip(self.problem.footprint, self.problem.caps, strict=True))

    @property
    def bound(self) -> Time:
        return lower_bound(self.problem) / self.pieces


def _checked(
    ranks: int,
    costs: Costs,
    memory: ActivationMemory | None,
    memory_cap: Time | Sequence[Time],
    placement: Sequence[int] | None,
) -> tuple[Costs, ActivationMemory, tuple[Time, ...]]:
    """Returns costs, bytes and the cap of every rank.

    Raises:
        ValueError: If one is out of range or has another number of entries.
    """
    if placement is not None:
        require(
            sorted(set(placement)) == list(range(ranks)),
            f"`placement` names the ranks {sorted(set(placement))} of {ranks} ranks.",
            "Give the rank of every stage, and every rank a stage.",
        )
    num_stages = ranks if placement is None else len(placement)
    check_costs(costs, num_stages)
    memory = memory or ActivationMemory()
    for name, values in (
        *((name, getattr(costs, name)) for name in ("forward", "input", "weight")),
        ("stored", memory.stored),
        ("kept", memory.kept),
    ):
        require(
            placement is not None or not isinstance(values, tuple),
            f"`{name}` is one cost per stage, but families have different numbers of stages.",
            "Give one number, of a whole rank, or a `placement`.",
        )
        require(
            not isinstance(values, tuple) or len(values) == num_stages,
            f"`{name}` does not have one entry for each of {num_stages} stages.",
            "Give one number, or one per stage in forward order.",
        )
    sizes = zip(_each(memory.stored, num_stages), _each(memory.kept, num_stages), strict=True)
    require(
        all(0 <= kept <= stored for stored, kept in sizes),
        f"`memory` is {memory}.",
        "Give bytes of 0 or more, and keep no more than is stored.",
    )
    caps = tuple(memory_cap) if isinstance(memory_cap, Sequence) else (memory_cap,) * ranks
    require(
        len(caps) == ranks,
        f"`memory_cap` has {len(caps)} entries for {ranks} ranks.",
        "Give one number, or one per rank.",
    )
    return costs, memory, caps


def _each(value: PerStage, num_stages: int) -> tuple[Time, ...]:
    return value if isinstance(value, tuple) else (value,) * num_stages


def _problem(
    rank_of: tuple[int, ...],
    microbatches: int,
    costs: Costs,
    memory: ActivationMemory,
    caps: tuple[Time, ...],
    synchronous: bool,
    pieces: int,
) -> Problem:
    S = len(rank_of)
    return Problem(
        rank_of,
        microbatches,
        (_each(costs.forward, S), _each(costs.input, S), _each(costs.weight, S)),
        costs.transfer * pieces,
        _each(memory.stored, S),
        _each(memory.kept, S),
        tuple(cap * pieces for cap in caps),
        synchronous,
    )


def _best_order(settings: list[_Setting]) -> Candidate | None:
    """Returns the best order of all settings; None if there are none.

    Those whose bound is best are searched first, and those whose bound is no better than what has
    been found are left out.
    """
    best: Candidate | None = None
    if not settings:
        return None
    fewest = min(setting.problem.num_actions for setting in settings)
    left: Time = _BASE_ACTIONS + _RUNS * fewest
    ordered = sorted(settings, key=lambda setting: (setting.bound, setting.problem.num_stages))
    for index, setting in enumerate(ordered):
        if best is not None and is_enough(best.step_time, setting.bound):
            break
        share = Budget(left / (len(ordered) - index))
        left -= share.left
        found = solve(setting.problem, share, lower_bound(setting.problem))
        left += share.left
        schedule = check(to_schedule(setting.problem, found.words))
        candidate = _measured(SEARCHED, (), schedule, setting, stage_costs(setting.problem))
        assert candidate is not None, "an order is within its caps"
        best = _better(candidate, best)
    return best


def _best_named(
    named: Iterable[Named], settings: list[_Setting], costs: Costs, best: Candidate | None
) -> Candidate | None:
    """Returns the better of a candidate and the best family.

    Args:
        named: The families, of placements that are searched or of none.
        settings: The placements that are searched.
        costs: The costs as they were given, for the times of fused pairs.
        best: A candidate, if there is one.
    """
    by_placement = {setting.problem.rank_of: setting for setting in settings}
    for one in named:
        setting = by_placement.get(one.rank_of) if one.rank_of else None
        # A fused pair may take less time than its halves, which no bound knows.
        if best is not None and setting is not None and costs.pair_factor >= 1:
            bound = named_bound(one, setting.problem) / setting.pieces
            if bound > best.step_time * (1 + ROUNDING):
                continue
        schedule = build_named(
            one, settings[0].problem.num_ranks, settings[0].problem.num_microbatches
        )
        if schedule is not None:
            setting = setting or _setting_of(schedule, settings[0])
            timed = replace(
                stage_costs(setting.problem),
                pair_factor=costs.pair_factor,
                atomic_pairs=costs.atomic_pairs,
            )
            best = _better(_measured(one.name, one.arguments, schedule, setting, timed), best)
    return best


def _setting_of(schedule: Schedule, straight: _Setting) -> _Setting:
    """Returns the setting of a schedule with slices, or with two copies of every stage."""
    slices, problem = num_slices(schedule), straight.problem
    caps = tuple(cap * slices for cap in problem.caps)
    return _Setting(replace(problem, transfer=problem.transfer * slices, caps=caps), slices)


def _measured(
    name: str,
    arguments: tuple[tuple[str, int], ...],
    schedule: Schedule,
    setting: _Setting,
    costs: Costs,
) -> Candidate | None:
    """Returns a schedule with its figures; None if it is not within the caps."""
    problem, pieces = setting.problem, setting.pieces
    peaks = peak_bytes(problem, words_of(schedule))
    if any(peak > cap for peak, cap in zip(peaks, problem.caps, strict=True)):
        return None
    timeline = simulate(schedule, costs)
    end = makespan(timeline)
    step_time = (
        end if problem.synchronous else parallelogram_bubble(timeline) + max(busy_times(timeline))
    )
    peak = max(peaks)
    whole = Fraction(peak) / pieces if isinstance(peak, int) else peak / pieces
    return Candidate(name, arguments, schedule, end / pieces, whole, step_time / pieces, 0)


def _better(one: Candidate | None, other: Candidate | None) -> Candidate | None:
    """Returns the faster candidate, of equal ones the leaner, of those the family."""
    if one is None or other is None:
        return one or other
    if not is_enough(one.step_time, other.step_time):
        return other
    if not is_enough(other.step_time, one.step_time):
        return one
    return min(one, other, key=lambda each: (each.peak, each.name == SEARCHED))


def _too_small(memory_cap: Time | Sequence[Time], settings: list[_Setting]) -> tuple[str, str]:
    """Returns what is wrong with a cap that no schedule keeps, and what to do."""
    least = min(max(setting.problem.footprint) / setting.pieces for setting in settings)
    return (
        f"`memory_cap` is {memory_cap}, and the leanest schedule tried holds {float(least):g} "
        "on a rank, one microbatch.",
        f"Give at least {float(least):g}, smaller microbatches, or rematerialise.",
    )
