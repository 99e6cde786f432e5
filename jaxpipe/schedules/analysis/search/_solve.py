"""Searches the orders of one problem: recipes, then local moves on the best of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from .._simulate import Time
from ._bounds import lower_bound
from ._dispatch import Policy, dispatch
from ._fill import fill_weights, forwards_and_inputs
from ._problem import Problem, Words
from ._recipes import Recipe, recipes

ROUNDING = 1e-9
_MARGINS = (1.0, 1.05, inf)
_SAFE = Policy(pace=0.5, wait_forward=0.5, wait_weight=0, reserve=0)


@dataclass(frozen=True)
class Found:
    """Words with their makespan, or longest span."""

    words: Words
    objective: Time


@dataclass
class Budget:
    """What a search may still spend, in actions whose time is computed."""

    left: Time

    def spend(self, problem: Problem, runs: Time = 1) -> None:
        """Counts some runs of a problem."""
        self.left -= runs * problem.num_actions


def solve(problem: Problem, budget: Budget, enough: Time) -> Found:
    """Returns the best words that are found for a problem.

    Args:
        problem: A problem whose caps hold one microbatch at least.
        budget: What may be spent; at least one order is made.
        enough: The objective at which the search ends, such as a lower bound.

    Returns:
        The words and their objective.
    """
    best = Found(*dispatch(problem, _SAFE))
    budget.spend(problem, 4)
    small = _with_fewer_microbatches(problem)
    for recipe in recipes() if small is problem else _ranked(small, budget):
        if is_enough(best.objective, enough) or budget.left <= 0:
            break
        for found in _made(problem, recipe, budget):
            if found.objective < best.objective:
                best = found
    return best


def is_enough(objective: Time, enough: Time) -> bool:
    """Returns whether an objective is as small, but for rounding."""
    return objective <= enough * (1 + ROUNDING)


def _with_fewer_microbatches(problem: Problem) -> Problem:
    """Returns the problem with no more microbatches than fill and drain a pipeline."""
    few = 3 * problem.num_ranks
    if problem.num_microbatches <= few * 3 // 2:
        return problem
    return replace(problem, num_microbatches=few)


def _ranked(problem: Problem, budget: Budget) -> Sequence[Recipe]:
    """Returns the recipes that are best for a smaller problem, within half the budget."""
    found, end, bound = [], budget.left / 2, lower_bound(problem)
    for index, recipe in enumerate(recipes()):
        made = (found.objective for found in _made(problem, recipe, budget))
        objective = min(made, default=inf)
        found.append((objective, index, recipe))
        if budget.left <= end or is_enough(objective, bound):
            break
    return [recipe for *_, recipe in sorted(found, key=lambda ranked: ranked[:2])]


def _made(problem: Problem, recipe: Recipe, budget: Budget) -> Iterator[Found]:
    """Yields what a recipe makes, as it is and with W's put in anew."""
    made = recipe(problem)
    budget.spend(problem, 2)
    if made is None:
        return
    words, objective = made
    if objective is not None:
        yield Found(words, objective)
    orders, bound = forwards_and_inputs(problem, words), lower_bound(problem)
    for margin in _MARGINS:
        budget.spend(problem)
        timed = fill_weights(problem, orders, bound * margin)
        if timed is not None:
            yield Found(timed.words, timed.objective)
