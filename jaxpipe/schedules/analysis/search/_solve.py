"""Searches the orders of one problem: recipes, then small changes of the best of them.

Both are done with few microbatches if there are many, and what was best is then done with all. So a
recipe, a way to an order, knows no counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf
from operator import attrgetter
from random import Random

from .._simulate import Time
from ._bounds import lower_bound
from ._dispatch import dispatch
from ._fill import fill_weights, forwards_and_inputs, run_words
from ._named import build_named, named_candidates
from ._problem import Problem, Words, words_of
from ._rules import Rules, fitted_rules, mutated, pace_rules, periodic_rules, strict_order

ROUNDING = 1e-9
_MARGINS = (1.0, 1.05, inf)
_STARTS = 3
_USED = 8
_DISPATCH_RUNS = 5  # a dispatch takes as long as so many fills

Recipe = Callable[[Problem], Rules | Words | None]
"""From a problem to rules, or an order of F and I, or None."""

Plan = Rules | Recipe
"""What makes an order for any number of microbatches."""

_NAMES = (
    "zero_bubble_h1",
    "zero_bubble_h2",
    "eager_1f1b",
    "zbv",
    "v_half",
    "v_min",
    "interleaved_zero_bubble",
    "kimi_k2",
    "grouped_interleaved",
)

_KINDS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "pace": (pace_rules, ("pace", "wait_forward", "wait_weight", "reserve")),
    "period": (periodic_rules, ("period", "delay", "seed")),
}

_TABLE: tuple[tuple[str, tuple[Time, ...]], ...] = (
    ("pace", (0.75, 0.5, 0.5, 0)),
    ("pace", (0.25, 0.5, 1, 0)),
    ("period", (1.052, 0, 0)),
    ("period", (1.496, 0, 0)),
    ("pace", (0.35, 0.25, 0.5, 0)),
    ("pace", (1, 0, 0, 0)),
    ("period", (1.2, 0, 0)),
    ("period", (0.844, 0, 0)),
    ("period", (1.149, 0, 0)),
    ("pace", (0.5, 0, 0, 0)),
    ("period", (1.37, 0.25, 2)),
    ("pace", (0.35, 1, 0.5, 0.5)),
    ("pace", (0.25, 0.5, 0.5, 1)),
    ("period", (0.773, 0, 0)),
    ("period", (1.37, 0.1, 1)),
    ("period", (1.563, 0, 0)),
    ("period", (1.311, 0, 0)),
    ("period", (0.922, 0, 0)),
    ("period", (1.254, 0, 0)),
    ("pace", (0.5, 0.25, 0.5, 0)),
    ("pace", (0.75, 0, 0.5, 0)),
    ("period", (0.417, 0, 0)),
    ("period", (1.563, 0.25, 2)),
    ("pace", (0.35, 0.5, 0.5, 0.5)),
    ("pace", (0.5, 1, 0, 0)),
    ("period", (1.007, 0, 0)),
    ("period", (0.808, 0, 0)),
    ("pace", (0.25, 0.5, 0, 1)),
    ("period", (0.677, 0.1, 1)),
    ("period", (0.74, 0, 0)),
    ("period", (1.149, 0.1, 1)),
    ("pace", (0.25, 0.5, 0.5, 0)),
    ("pace", (0.75, 1, 0, 0)),
    ("pace", (0.25, 1, 0, 0)),
    ("pace", (0.5, 1, 0.5, 0)),
    ("pace", (0.75, 1, 0.5, 0)),
)
"""Arguments of rules. The order is that in which each adds most to those before it: of 200, for 90
problems of 6 ranks and 15 microbatches. The best of the table is on average within 0.01% of the
best of the 200."""


@cache
def recipes() -> Sequence[Recipe]:
    """Returns all recipes: three paces, the orders of families, then the other rows."""
    first, *rest = (_of_row(*row) for row in _TABLE)
    named = (partial(_named, name=name) for name in _NAMES)
    return [first, *rest[:2], *named, *rest[2:]]


def _of_row(kind: str, values: tuple[Time, ...]) -> Recipe:
    rules, names = _KINDS[kind]
    return partial(rules, **dict(zip(names, values, strict=True)))


def _named(problem: Problem, name: str) -> Words | None:
    """Returns the order of F and I of a family, if it has the placement of a problem."""
    p, m = problem.num_ranks, problem.num_microbatches
    chunks = max(2, problem.num_stages // p)
    for named in named_candidates(p, m, (name,), max_chunks=chunks, usual_groups=True):
        if named.rank_of == problem.rank_of:
            schedule = build_named(named, p, m)
            if schedule is not None:
                return forwards_and_inputs(problem, words_of(schedule))
    return None


@dataclass(frozen=True)
class Solution:
    """Words with their makespan, or longest span, and the plan that has made them."""

    words: Words
    objective: Time
    plan: Plan


@dataclass
class Budget:
    """The actions whose time a search may still compute; a part also spends from `whole`."""

    left: Time
    whole: "Budget | None" = None

    def spend(self, problem: Problem, runs: int = 1) -> None:
        """Counts some runs of a problem."""
        self.left -= runs * problem.num_actions
        if self.whole is not None:
            self.whole.spend(problem, runs)

    def part(self, fraction: Time) -> "Budget":
        """Returns a part of what is left."""
        return Budget(self.left * fraction, self)


class Solver:
    """The search of one problem, which may be continued; `bound` is a lower bound of its time."""

    def __init__(self, problem: Problem, budget: Budget):
        """Makes one order."""
        self.problem, self.bound = problem, lower_bound(problem)
        self._small = _with_fewer_microbatches(problem)
        self._small_bound = lower_bound(self._small)
        self._solutions: list[Solution] = []
        self._tried = 0  # recipes
        self._used: list[Plan] = []
        safe = pace_rules(problem, pace=0.25, wait_forward=1, wait_weight=0.5, reserve=0)
        solution = _best_of(problem, safe, budget)
        assert solution is not None, "a list schedule never deadlocks"
        self.best = solution

    @property
    def is_done(self) -> bool:
        """Returns whether no order can be better."""
        return is_enough(self.best.objective, self.bound)

    def try_recipes(self, count: int, budget: Budget) -> None:
        """Tries the next recipes, and what was best with all microbatches."""
        chosen = recipes()[self._tried : self._tried + count]
        self._tried += count
        for recipe in chosen:
            if self.is_done or budget.left <= 0:
                return
            solution = _best_of(self._small, recipe, budget)
            if solution is not None:
                self._add(solution)
        self._use_best(budget)

    def improve(self, budget: Budget) -> None:
        """Changes the best rules a little, again and again, as long as the budget lasts."""
        random = Random(0)
        climbers = self._climbers(budget)
        reserve = min(budget.left / 3, _STARTS * 3 * _DISPATCH_RUNS * self.problem.num_actions)
        if self._small is self.problem:
            reserve = 0
        while climbers and budget.left > reserve and not self.is_done:
            for index, climber in enumerate(climbers):
                assert isinstance(climber.plan, Rules)
                rules = mutated(self._small, climber.plan, random)
                solution = _best_of(self._small, rules, budget, [rules.margin])
                if solution is not None and solution.objective <= climber.objective:
                    climbers[index] = solution
                    self._add(solution)
            if any(is_enough(climber.objective, self._small_bound) for climber in climbers):
                break
        self._use_best(budget)

    def _add(self, solution: Solution) -> None:
        self._solutions.append(solution)
        if self._small is self.problem and solution.objective < self.best.objective:
            self.best = solution

    def _climbers(self, budget: Budget) -> list[Solution]:
        """Returns the best rules that are followed to the letter, and the best that are not."""
        climbers = []
        for solution in sorted(self._solutions, key=attrgetter("objective")):
            plan = solution.plan
            if not isinstance(plan, Rules):
                plan = _rules(self._small, plan, solution)
                solution = _best_of(self._small, plan, budget)
            if solution is not None and isinstance(solution.plan, Rules):
                kinds = [other.plan.strict for other in climbers]
                if kinds.count(solution.plan.strict) < (1 if solution.plan.strict else 2):
                    climbers.append(solution)
            if len(climbers) == _STARTS:
                break
        return climbers

    def _use_best(self, budget: Budget) -> None:
        """Makes orders with all microbatches by the best plans."""
        if self._small is self.problem:
            return
        objectives = set()
        for small_solution in sorted(self._solutions, key=attrgetter("objective")):
            if self.is_done or budget.left <= 0 or len(objectives) == _USED:
                return
            if small_solution.objective in objectives:
                continue
            objectives.add(small_solution.objective)
            if small_solution.plan not in self._used:
                self._used.append(small_solution.plan)
                solution = _best_of(self.problem, small_solution.plan, budget)
                if solution is not None and solution.objective < self.best.objective:
                    self.best = solution


def is_enough(objective: Time, enough: Time) -> bool:
    """Returns whether an objective is as small, but for rounding."""
    return objective <= enough * (1 + ROUNDING)


def _with_fewer_microbatches(problem: Problem) -> Problem:
    """Returns the problem with no more microbatches than fill and drain a pipeline."""
    few = 3 * problem.num_ranks
    if problem.num_microbatches <= few * 5 // 4:
        return problem
    return replace(problem, num_microbatches=few)


def _rules(problem: Problem, recipe: Recipe, solution: Solution) -> Rules:
    """Returns the rules that a recipe makes, or rules that come near to its order."""
    plan = recipe(problem)
    return plan if isinstance(plan, Rules) else fitted_rules(problem, solution.words)


def _best_of(
    problem: Problem, plan: Plan, budget: Budget, margins: Sequence[Time] = _MARGINS
) -> Solution | None:
    """Returns the best of the orders of a plan, as it is and with W's put in anew."""
    rules = plan if isinstance(plan, Rules) else plan(problem)
    best: Solution | None = None
    if rules is None:
        return None
    if not isinstance(rules, Rules):
        orders = rules
    elif rules.strict:
        orders = strict_order(problem, rules)
    else:
        words, _ = dispatch(problem, rules)
        best = Solution(words, run_words(problem, words), plan)
        budget.spend(problem, _DISPATCH_RUNS)
        orders = forwards_and_inputs(problem, best.words)
    for margin in margins:
        budget.spend(problem)
        filled = fill_weights(problem, orders, margin * lower_bound(problem))
        if filled is not None and (best is None or filled[1] < best.objective):
            used = replace(plan, margin=margin) if isinstance(plan, Rules) and plan.strict else plan
            best = Solution(*filled, used)
    return best
