"""How a stack of layers moves between the ranks of a run and the forward order of checkpoints."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Int, PyTree

from ... import models
from ...sharding import without_axes
from ..plan._setup import Setup
from ..step._per_stage_state import layer_ids_by_rank


@runtime_checkable
class LayerReordering(Protocol):
    """From a stack as it lies on ranks, such as [R, S, layers, ...], to [L, ...] and back.

    What has been moved is deleted.
    """

    def to_layer_order(self, x: jax.Array, where: NamedSharding) -> jax.Array:
        """Layers in forward order.

        Args:
            x: The stack on ranks.
            where: How the result lies.
        """
        ...

    def to_rank_order(self, x: jax.Array, where: NamedSharding, wanted: NamedSharding) -> jax.Array:
        """The inverse.

        Args:
            x: Layers in forward order.
            where: How they lie.
            wanted: How the result lies.
        """
        ...


def layer_reordering(setup: Setup) -> LayerReordering:
    """Those of a run. They compile at their first call for every shape and sharding."""
    numbers = _layer_ids(setup)
    return (
        LocalReshape(setup, numbers.shape) if is_in_layer_order(setup) else AllToAll(setup, numbers)
    )


def is_in_layer_order(setup: Setup) -> bool:
    """Whether ranks have their layers in forward order, none of them twice or padded."""
    numbers = _layer_ids(setup)
    ranks_first = setup.per_stage_state or setup.layout.num_repeats == 1
    return ranks_first and np.array_equal(numbers.ravel(), np.arange(numbers.size))


class LocalReshape:
    """Of ranks that have their layers in forward order: nothing leaves its device."""

    def __init__(self, setup: Setup, dims: tuple[int, ...]) -> None:
        def flat(x: jax.Array) -> jax.Array:
            return x.reshape(math.prod(dims), *x.shape[len(dims) :])

        def stacked(x: jax.Array) -> jax.Array:
            return x.reshape(*dims, *x.shape[1:])

        self._flat = cache(partial(jit_on_mesh, setup, flat))
        self._stacked = cache(partial(jit_on_mesh, setup, stacked))

    def to_layer_order(self, x: jax.Array, where: NamedSharding) -> jax.Array:
        return move_and_delete(self._flat(where), x)

    def to_rank_order(self, x: jax.Array, where: NamedSharding, wanted: NamedSharding) -> jax.Array:
        del where
        return move_and_delete(self._stacked(wanted), x)


class AllToAll:
    """Of all others: ranks exchange parts of layers, until each has its part of every layer. There
    any order is within reach without another exchange."""

    def __init__(self, setup: Setup, numbers: Int[np.ndarray, "..."]) -> None:
        num_absent = np.sum(numbers < 0)
        places = np.argsort(numbers, axis=None, stable=True)[num_absent:]
        self._num_dims = numbers.ndim

        def ordered(x: jax.Array) -> jax.Array:
            return x.reshape(numbers.size, *x.shape[numbers.ndim :])[places]

        def stacked(x: jax.Array) -> jax.Array:
            x = models.where_present(x[numbers.ravel()], numbers)
            return x.reshape(*numbers.shape, *x.shape[1:])

        self._ordered = cache(partial(jit_on_mesh, setup, ordered))
        self._stacked = cache(partial(jit_on_mesh, setup, stacked))
        self._exchanged = cache(partial(jit_on_mesh, setup, jnp.copy))

    def to_layer_order(self, x: jax.Array, where: NamedSharding) -> jax.Array:
        x = move_and_delete(self._exchanged(self._whole_layers(where)), x)
        return move_and_delete(self._ordered(where), x)

    def to_rank_order(self, x: jax.Array, where: NamedSharding, wanted: NamedSharding) -> jax.Array:
        x = move_and_delete(self._stacked(self._whole_layers(where)), x)
        return move_and_delete(self._exchanged(wanted), x)

    def _whole_layers(self, where: NamedSharding) -> NamedSharding:
        """How a stack on ranks lies that is divided as one in forward order, but not by layers."""
        return NamedSharding(where.mesh, PartitionSpec(*[None] * self._num_dims, *where.spec[1:]))


def move_and_delete(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """What `move` makes of an array, which is then deleted."""
    found = move(x)
    delete(x, once=found)
    return found


def delete(tree: PyTree, *, once: PyTree) -> None:
    """Deletes arrays when those that were made of them are there."""
    jax.block_until_ready(once)
    for x in jax.tree.leaves(tree):
        x.delete()


def jit_on_mesh(setup: Setup, f: Callable[..., PyTree], where: PyTree) -> Callable[..., PyTree]:
    """`f` compiled for arrays on `setup.mesh`, whose explicit axes do not follow moving layers.

    Args:
        setup: The run.
        f: What moves arrays.
        where: How its results lie.
    """
    work: Any = f
    if setup.config.shard_mode == "explicit":
        work = jax.sharding.auto_axes(f, out_sharding=jax.tree.map(_with_explicit_axes_only, where))
    program = jax.jit(work, out_shardings=where)

    def run(*arrays: jax.Array) -> PyTree:
        with jax.set_mesh(setup.mesh):
            return program(*arrays)

    return run


def _with_explicit_axes_only(where: NamedSharding) -> NamedSharding:
    """What a type says of `where`."""
    kinds = zip(where.mesh.axis_names, where.mesh.axis_types, strict=True)
    others = [axis for axis, kind in kinds if kind is not AxisType.Explicit]
    return NamedSharding(where.mesh, without_axes(where.spec, others))


def _layer_ids(setup: Setup) -> Int[np.ndarray, "..."]:
    """Of every place of a stack on ranks the number of its layer, or -1 if it has none."""
    if setup.per_stage_state:
        return layer_ids_by_rank(setup)
    return np.array(setup.layout.layer_ids, int).reshape(setup.layout.dims)
