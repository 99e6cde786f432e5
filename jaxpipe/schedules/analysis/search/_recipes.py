"""Recipes: ways to make an order for a problem, to be tried one after the other.

A recipe knows no counts, so that it can be tried on few microbatches before it is used on many.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

from ...builders._registry import build
from .._simulate import Time
from ._dispatch import Policy, dispatch
from ._fill import forwards_and_inputs
from ._periodic import periodic_order
from ._problem import Problem, Words, rank_of_stages, words_of

Recipe = Callable[[Problem], tuple[Words, Time | None] | None]
"""From a problem to words and their objective; or to an order of F and I, and None; or to None."""

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
    "looped_bfs",
)


def recipes() -> Sequence[Recipe]:
    """Returns all recipes, the most promising first."""
    policies = [
        Policy(pace, wait_forward, wait_weight, reserve)
        for reserve, pace, wait_weight, wait_forward in product(
            (0, 1, 0.5), (0.25, 0.5, 1, 0.125, 0.75), (0, 0.5), (0.5, 0, 1)
        )
    ]
    by_policy = [partial(dispatch, policy=policy) for policy in policies]
    periodic = [
        partial(_periodic, period=0.35 * 1.04**index, delay=0.1 * turn, seed=turn)
        for turn in range(3)
        for index in range(40)
    ]
    mixed = [recipe for pair in zip(by_policy, periodic, strict=False) for recipe in pair]
    rest = by_policy[len(periodic) :] + periodic[len(by_policy) :]
    return [partial(_named, name=name) for name in _NAMES] + mixed + rest


def _periodic(problem: Problem, period: Time, delay: Time, seed: int) -> tuple[Words, None] | None:
    order = periodic_order(problem, period, delay, seed)
    return None if order is None else (order, None)


def _named(problem: Problem, name: str) -> tuple[Words, None] | None:
    """Returns the order of F and I of a family, if it has the placement of a problem."""
    chunks, rest = divmod(problem.num_stages, problem.num_ranks)
    if rest:
        return None
    given = {"chunks": chunks} if chunks > 1 and name in _WITH_CHUNKS else {}
    try:
        schedule = build(
            name, ranks=problem.num_ranks, microbatches=problem.num_microbatches, **given
        )
    except ValueError:
        return None  # these counts are not for this family
    if rank_of_stages(schedule) != problem.rank_of:
        return None
    return forwards_and_inputs(problem, words_of(schedule)), None


_WITH_CHUNKS = ("interleaved_zero_bubble", "kimi_k2", "grouped_interleaved", "looped_bfs")
