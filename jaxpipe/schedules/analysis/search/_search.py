"""The fastest schedule that fits, and a time that no schedule can beat.

Families cut the model into different numbers of stages. To compare them, costs and bytes are those
of a whole rank's share of the model unless a placement is given: a stage has `ranks / num_stages`
of it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial, reduce
from math import floor

from ...builders._require import require, require_positive
from ...language._check import check
from ...language._placement import usual_placements
from ...language._schedule import Schedule, num_slices
from ...lock_step._grid_search import to_lock_step
from ...lock_step._ticks import simulate_ticks
from .._measure import makespan, peak_activations
from .._simulate import Costs, Time, simulate
from ._arguments import ActivationMemory, checked_arguments, each, memory_of_slots
from ._bounds import lower_bound
from ._named import Named, build_named, named_bound, named_candidates, named_time
from ._problem import Problem, Words, peak_bytes, stage_costs, to_schedule, words_of
from ._solve import ROUNDING, Budget, Solution, Solver, is_enough

SEARCHED = "searched"
"""The name of a schedule that is of no family."""

_BASE_ACTIONS, _MOST_RUNS, _RUNS = 400_000, 1000, 60
"""What a search may spend: so many actions, but no more than so many runs of the placement with the
fewest actions; and some more such runs."""
_FIRST_RECIPES, _MORE_RECIPES = 13, 40
_FRACTIONS = (0.6, 1)
"""What the best placement may spend of what is left, and then the second."""


@dataclass(frozen=True)
class Candidate:
    """A schedule with its name, its arguments for `build` (none if searched) and its figures.

    Attributes:
        makespan: The time from the start to the end, in the unit of the costs.
        peak: The bytes of the fullest rank; by default in microbatches of a whole rank.
        step_time: The time that the search has minimised: the makespan, or the longest span of a
            rank.
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
        """Returns the step time above the bound, as a fraction of the bound."""
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
    lock_step: bool = False,
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
        max_chunks: The most stages per rank to try, where there is no `placement`.
        max_slices: The most sequence slices to try; more than 1 needs causal attention.
        placement: [num_stages] the rank of every stage, if no other placement shall be tried.
        memory: Bytes of a microbatch on a whole rank; with a `placement`, on a stage. Integers are
            counted exactly. None: 1, until the W.
        synchronous: Whether the ranks wait for each other between steps. If not, a step takes as
            long as the longest span of a rank, from its first start to its last end.
        lock_step: Whether all ranks run in ticks, as one program of the engine `scheduled` does.
            Times and bytes are then those of `to_lock_step(schedule, costs, memory_cap=...)`: all
            ranks have the slots of the fullest, and a slot has the bytes of the largest stage.

    Returns:
        The schedule with its name, arguments and figures.

    Raises:
        ValueError: If no schedule fits, naming the least memory that any schedule needs; or if an
            argument is out of range.

    Example:
        >>> best = search(2, 4, Costs(), memory_cap=2)
        >>> best.peak <= 2, best.makespan, best.gap
        (True, 12.25, 0.0)
        >>> in_ticks = search(2, 4, Costs(), memory_cap=2, lock_step=True)
        >>> in_ticks.peak <= 2, in_ticks.makespan >= best.makespan
        (True, True)
    """
    require_positive(
        ranks=ranks, microbatches=microbatches, max_chunks=max_chunks, max_slices=max_slices
    )
    costs, memory, caps = checked_arguments(ranks, costs, memory, memory_cap, placement)
    if lock_step:
        memory, caps = memory_of_slots(memory, caps, synchronous)
    if placement is not None:
        max_chunks = len(placement) // ranks
    tried = usual_placements(ranks, max_chunks) if placement is None else [tuple(placement)]

    def setting_of(rank_of: tuple[int, ...]) -> _Setting:
        pieces = len(rank_of) // ranks if placement is None else 1
        of_stages = partial(each, num_stages=len(rank_of))
        problem = Problem(
            rank_of=rank_of,
            num_microbatches=microbatches,
            times=tuple(map(of_stages, (costs.forward, costs.input, costs.weight))),
            transfer=costs.transfer * pieces,
            stored=of_stages(memory.stored),
            kept=of_stages(memory.kept),
            caps=tuple(cap * pieces for cap in caps),
            synchronous=synchronous,
        )
        return _Setting(problem, pieces)

    settings = [setting_of(rank_of) for rank_of in tried]
    named = list(
        named_candidates(ranks, microbatches, max_chunks=max_chunks, max_slices=max_slices)
    )
    if placement is not None:
        named = [family for family in named if family.rank_of == settings[0].problem.rank_of]
    fitting = [setting for setting in settings if setting.fits]
    as_run = partial(_in_ticks, costs) if lock_step else lambda fit: fit
    orders = [as_run(order) for order in _orders(fitting)]
    best_order = reduce(_better, orders) if orders else None
    best = _best_named(named, settings, setting_of, costs, best_order, as_run)
    require(best is not None, *_too_small(memory_cap, settings))
    assert best is not None
    bound = min([best.step_time, *(setting.bound for setting in fitting)])
    return _candidate(best, costs, bound, best.step_time if lock_step else None)


@dataclass(frozen=True)
class _Setting:
    """A problem whose times and bytes are in a fraction of the caller's units: 1 / `pieces`.

    Integers so stay exact, and equal times compare equal.
    """

    problem: Problem
    pieces: int

    @property
    def fits(self) -> bool:
        """Returns whether every rank can store a microbatch."""
        return all(a <= b for a, b in zip(self.problem.footprint, self.problem.caps, strict=True))

    @property
    def bound(self) -> Time:
        return lower_bound(self.problem) / self.pieces


@dataclass(frozen=True)
class _Fit:
    """A schedule that fits, with its figures in the caller's units; `Candidate` has the fields."""

    name: str
    arguments: tuple[tuple[str, int], ...]
    setting: _Setting
    schedule: Schedule | Words
    step_time: Time
    peak: Time | Fraction


def _in_ticks(costs: Costs, fit: _Fit) -> _Fit:
    """Returns a candidate with its time and bytes in lock-step."""
    setting, schedule = fit.setting, _schedule(fit)
    size, stage_costs = setting.problem.stored[0], _costs(setting, costs)
    slots = floor(setting.problem.caps[0] / size * (1 + ROUNDING)) if size else None
    ticks = to_lock_step(schedule, stage_costs, memory_cap=slots)
    time = makespan(simulate_ticks(ticks, stage_costs)) / setting.pieces
    peak = _divided(size * max(peak_activations(ticks.schedule)), setting.pieces)
    return replace(fit, schedule=schedule, step_time=time, peak=peak)


def _orders(settings: list[_Setting]) -> list[_Fit]:
    """Returns the best order of every setting that was tried.

    Every placement is tried a little, unless its bound is no better than what has been found. Most
    of the time is for the best two.
    """
    if not settings:
        return []
    fewest = min(setting.problem.num_actions for setting in settings)
    budget = Budget(min(_BASE_ACTIONS, _MOST_RUNS * fewest) + _RUNS * fewest)
    solvers: list[tuple[_Setting, Solver]] = []

    def best_time() -> Time:
        return min(solver.best.objective / setting.pieces for setting, solver in solvers)

    for setting in sorted(settings, key=lambda s: (s.bound, s.problem.num_stages)):
        if solvers and is_enough(best_time(), setting.bound):
            break
        solver = Solver(setting.problem, budget)
        solver.try_recipes(_FIRST_RECIPES, budget.part(1 / 7))
        solvers.append((setting, solver))
    for index, fraction in enumerate(_FRACTIONS):
        solvers.sort(key=lambda each: each[1].best.objective / each[0].pieces)
        promising = [pair for pair in solvers if not is_enough(best_time(), pair[0].bound)]
        if index < len(promising):
            solver = promising[index][1]
            solver.try_recipes(_MORE_RECIPES, budget.part(fraction / 2))
            solver.improve(budget.part(fraction))
    return [_searched(setting, solver.best) for setting, solver in solvers]


def _searched(setting: _Setting, solution: Solution) -> _Fit:
    peak = _peak(setting, solution.words)
    assert peak is not None, "an order is within its caps"
    return _Fit(
        name=SEARCHED,
        arguments=(),
        setting=setting,
        schedule=solution.words,
        step_time=solution.objective / setting.pieces,
        peak=peak,
    )


def _best_named(
    named: Iterable[Named],
    settings: list[_Setting],
    setting_of: Callable[[tuple[int, ...]], _Setting],
    costs: Costs,
    best: _Fit | None,
    as_run: Callable[[_Fit], _Fit],
) -> _Fit | None:
    """Returns the better of what was found and the best family, in any placement."""
    by_placement = {setting.problem.rank_of: setting for setting in settings}
    some = settings[0].problem
    for family in named:
        setting = None
        if family.rank_of is not None:
            setting = by_placement.get(family.rank_of) or setting_of(family.rank_of)
            by_placement[family.rank_of] = setting
        # A fused pair may take less time than its halves, which no bound knows.
        if best is not None and setting is not None and costs.pair_factor >= 1:
            bound = named_bound(family, setting.problem) / setting.pieces
            if bound > best.step_time * (1 + ROUNDING):
                continue
        schedule = build_named(family, some.num_ranks, some.num_microbatches)
        if schedule is None:
            continue
        setting = setting or _setting_of(schedule, settings[0])
        peak = _peak(setting, words_of(schedule))
        if peak is None:
            continue
        time = (
            named_time(family, schedule, setting.problem, _costs(setting, costs)) / setting.pieces
        )
        fit = _Fit(
            name=family.name,
            arguments=family.arguments,
            setting=setting,
            schedule=schedule,
            step_time=time,
            peak=peak,
        )
        best = _better(as_run(fit), best)
    return best


def _setting_of(schedule: Schedule, straight: _Setting) -> _Setting:
    """Returns the setting of a schedule with slices, or with two copies of every stage."""
    slices, problem = num_slices(schedule), straight.problem
    caps = tuple(cap * slices for cap in problem.caps)
    return _Setting(replace(problem, transfer=problem.transfer * slices, caps=caps), slices)


def _costs(setting: _Setting, whole: Costs) -> Costs:
    """Returns the costs of a setting's stages, with those of fused pairs as they were given."""
    return replace(
        stage_costs(setting.problem), pair_factor=whole.pair_factor, atomic_pairs=whole.atomic_pairs
    )


def _peak(setting: _Setting, words: Words) -> Time | Fraction | None:
    """Returns the bytes of the fullest rank; None if they are more than a cap."""
    peaks = peak_bytes(setting.problem, words)
    if any(peak > cap for peak, cap in zip(peaks, setting.problem.caps, strict=True)):
        return None
    return _divided(max(peaks), setting.pieces)


def _divided(size: Time, pieces: int) -> Time | Fraction:
    return Fraction(size, pieces) if isinstance(size, int) else size / pieces


def _better(first: _Fit, second: _Fit | None) -> _Fit:
    """Returns the faster of two, of equal ones the leaner, of those the family."""
    if second is None or not is_enough(second.step_time, first.step_time):
        return first
    if not is_enough(first.step_time, second.step_time):
        return second
    return min(first, second, key=lambda fit: (fit.peak, fit.name == SEARCHED))


def _schedule(fit: _Fit) -> Schedule:
    """Returns the orders of a search as a schedule that is checked."""
    if isinstance(fit.schedule, Schedule):
        return fit.schedule
    return check(to_schedule(fit.setting.problem, fit.schedule))


def _candidate(fit: _Fit, costs: Costs, bound: Time, time: Time | None) -> Candidate:
    """Returns a candidate, with its makespan if that is known, or else the simulator's."""
    schedule = _schedule(fit)
    if time is None:
        timeline = simulate(schedule, _costs(fit.setting, costs))
        time = makespan(timeline) / fit.setting.pieces
    return Candidate(
        name=fit.name,
        arguments=fit.arguments,
        schedule=schedule,
        makespan=time,
        peak=fit.peak,
        step_time=fit.step_time,
        bound=bound,
    )


def _too_small(memory_cap: Time | Sequence[Time], settings: list[_Setting]) -> tuple[str, str]:
    """Returns the error of a cap that no schedule keeps, which says what to do."""
    least = min(max(setting.problem.footprint) / setting.pieces for setting in settings)
    return (
        f"`memory_cap` is {memory_cap}, and the leanest schedule tried holds {float(least):g} "
        "on a rank, one microbatch.",
        f"Give at least {float(least):g}, smaller microbatches, or rematerialise.",
    )
