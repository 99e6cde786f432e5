"""A state without its pipeline: layers in forward order, [L, ...], whatever ranks they lay on.

This is what checkpoints hold, so that any layout and engine can go on from them.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

from .. import sharding
from ._setup import STACKED, Setup
from ._step import State, state_axes, state_shapes, state_shardings


def canonical_shapes(setup: Setup) -> PyTree[jax.ShapeDtypeStruct]:
    """Shapes and shardings of a canonical state. Layers are split over the ranks."""
    shapes, axes = state_shapes(setup), state_axes(setup)
    flat = jax.tree.map(
        lambda leaf, a: jax.ShapeDtypeStruct(_flat_shape(leaf.shape, a), leaf.dtype), shapes, axes
    )
    flat_axes = jax.tree.map(lambda _, a: _flat_axes(a), shapes, axes)
    where = sharding.named_shardings(flat, flat_axes, setup.mesh, setup.rules)
    return jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), flat, where
    )


def make_canonical(setup: Setup) -> Callable[[State], State]:
    """A function that makes a canonical copy of a state; it compiles at its first call.

    The copy is as large as the state and lies beside it on the devices until it is written.
    """
    shapes = canonical_shapes(setup)
    where = jax.tree.map(lambda leaf: leaf.sharding, shapes)

    def flatten(state: State) -> State:
        return jax.tree.map(lambda x, leaf: x.reshape(leaf.shape), state, shapes)

    return jax.jit(flatten, out_shardings=where)


def from_canonical(setup: Setup, canonical: State) -> State:
    """A state laid out for this run."""

    def stack(canonical: State) -> State:
        return jax.tree.map(lambda x, leaf: x.reshape(leaf.shape), canonical, state_shapes(setup))

    return jax.jit(stack, out_shardings=state_shardings(setup))(canonical)


def _is_stacked(axes: Any) -> bool:
    return axes[: len(STACKED)] == STACKED


def _flat_shape(shape: tuple[int, ...], axes: sharding.LogicalAxes) -> tuple[int, ...]:
    if not _is_stacked(axes):
        return shape
    return (math.prod(shape[: len(STACKED)]), *shape[len(STACKED) :])


def _flat_axes(axes: sharding.LogicalAxes) -> sharding.LogicalAxes:
    return ("stage", *axes[len(STACKED) :]) if _is_stacked(axes) else axes
