"""Conditions that change large arrays in place, where conditionals of XLA copy them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ... import _compat
from ._equations import pvary_like

_COPYING = {"gpu"}
"""Platforms on which XLA copies all that a conditional returns, of its operands too."""


def copies_in_conditionals() -> bool:
    """Returns whether the platform of the mesh in context copies what a conditional returns."""
    return _compat.platform() in _COPYING


def run_once_if(predicate: Any, update: Callable, state: Any, *, hint: str = "") -> Any:
    """Returns `update(state)` if `predicate` is true, else `state`, by a loop: in place.

    The results vary over the manual axes of `state`. `hint` is a name scope such as
    `taken_3_of_10`, which tells an audit how often the predicate is true.
    """
    types = jax.tree.map(jax.typeof, state)

    def once(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        running, state = carry
        done = pvary_like(jax.typeof(running), jnp.bool_(False))
        return done, jax.tree.map(pvary_like, types, update(state))

    with jax.named_scope(hint or "taken_1_of_1"):  # tells an audit that it is a condition
        return lax.while_loop(lambda carry: carry[0], once, (predicate, state))[1]


def switch_in_place(
    index: Any, branches: Sequence[Callable], inputs: Sequence[Any], avals: Sequence[Any], sums: Any
) -> list[Any]:
    """Returns the outputs of one of the branches `(inputs, sums) -> (outputs, new sums)`."""
    outputs = [pvary_like(aval, jnp.zeros(aval.shape, aval.dtype)) for aval in avals]
    state = [*outputs, *sums]
    for i, branch in enumerate(branches):
        update = lambda state, run=branch: list(run(*inputs, *state[len(avals) :]))  # noqa: E731
        state = run_once_if(index == i, update, state)
    return state
