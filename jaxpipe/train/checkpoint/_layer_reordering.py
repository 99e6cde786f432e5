"""Reorders stacks of layers between the ranks of a run and the forward order of checkpoints."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int, PyTree

from ...models.weights import mask_padding_layers
from ...sharding.specs import with_auto_axes
from ..plan._weight_plan import WeightPlan


class LayerReordering(NamedTuple):
    """Converts a stack on ranks, [R, S, layers, ...], to [L, ...] and back, and deletes it.

    Attributes:
        to_layer_order: `(x, sharding of the layers) -> layers [L, ...] in forward order`.
        to_rank_order: `(x, its sharding, sharding of the stack) -> stack`, the inverse.
    """

    to_layer_order: Callable[[jax.Array, NamedSharding], jax.Array]
    to_rank_order: Callable[[jax.Array, NamedSharding, NamedSharding], jax.Array]


def layer_reordering(weights: WeightPlan) -> LayerReordering:
    """Returns the reordering of a run, compiled at the first call for each shape and sharding."""
    layer_ids, mesh = weights.slot_layer_ids, weights.devices.mesh
    if is_in_layer_order(weights):
        return _local_reshape(mesh, layer_ids.shape)
    return _all_to_all(mesh, layer_ids)


def is_in_layer_order(weights: WeightPlan) -> bool:
    """Returns whether ranks have layers in forward order, without duplicates or padding."""
    layer_ids = weights.slot_layer_ids
    ranks_first = layer_ids.ndim == 2 or layer_ids.shape[0] == 1  # else repeats are first
    return ranks_first and np.array_equal(layer_ids.ravel(), np.arange(layer_ids.size))


def _local_reshape(mesh: Mesh, dims: tuple[int, ...]) -> LayerReordering:
    """Reshapes stacks whose ranks have layers in forward order, without communication."""

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(math.prod(dims), *x.shape[len(dims) :])

    def stacked(x: jax.Array) -> jax.Array:
        return x.reshape(*dims, *x.shape[1:])

    to_flat, to_stacked = (cache(partial(jit_on_mesh, mesh, f)) for f in (flat, stacked))
    return LayerReordering(
        lambda x, where: move_and_delete(to_flat(where), x),
        lambda x, _, target: move_and_delete(to_stacked(target), x),
    )


def _all_to_all(mesh: Mesh, layer_ids: Int[np.ndarray, "..."]) -> LayerReordering:
    """Reorders stacked layers across ranks with one all-to-all per leaf.

    After it each rank has a part of every layer, so that it can reorder layers locally.
    """
    num_padding = np.sum(layer_ids < 0)
    positions = np.argsort(layer_ids, axis=None, stable=True)[num_padding:]

    def ordered(x: jax.Array) -> jax.Array:
        return x.reshape(layer_ids.size, *x.shape[layer_ids.ndim :])[positions]

    def stacked(x: jax.Array) -> jax.Array:
        x = mask_padding_layers(x[layer_ids.ravel()], layer_ids)
        return x.reshape(*layer_ids.shape, *x.shape[1:])

    to_ordered, to_stacked, copy_to = (
        cache(partial(jit_on_mesh, mesh, f)) for f in (ordered, stacked, jnp.copy)
    )

    def without_layer_shards(where: NamedSharding) -> NamedSharding:
        """Returns the sharding of a stack on ranks, sharded as in forward order but for layers."""
        spec = PartitionSpec(*[None] * layer_ids.ndim, *where.spec[1:])
        return NamedSharding(where.mesh, spec)

    def to_layer_order(x: jax.Array, where: NamedSharding) -> jax.Array:
        x = move_and_delete(copy_to(without_layer_shards(where)), x)
        return move_and_delete(to_ordered(where), x)

    def to_rank_order(x: jax.Array, where: NamedSharding, target: NamedSharding) -> jax.Array:
        x = move_and_delete(to_stacked(without_layer_shards(where)), x)
        return move_and_delete(copy_to(target), x)

    return LayerReordering(to_layer_order, to_rank_order)


def move_and_delete(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Applies `move` to an array and deletes the array."""
    moved = move(x)
    delete(x, once=moved)
    return moved


def delete(tree: PyTree, *, once: PyTree) -> None:
    """Deletes the arrays of `tree` once those of `once`, computed from them, are ready."""
    jax.block_until_ready(once)
    for x in jax.tree.leaves(tree):
        x.delete()


def jit_on_mesh(mesh: Mesh, f: Callable[..., PyTree], where: PyTree) -> Callable[..., PyTree]:
    """Compiles `f` for arrays on a mesh, with all axes automatic inside."""
    program = jax.jit(with_auto_axes(mesh, f, where), out_shardings=where)

    def run(*arrays: PyTree) -> PyTree:
        with jax.set_mesh(mesh):
            return program(*arrays)

    return run
