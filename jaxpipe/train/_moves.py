"""How a stack of layers moves between the ranks of a run and the forward order of checkpoints."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Int, PyTree

from .. import models
from ._apart import layers_of_ranks
from ._setup import Setup


class Moves:
    """Programs that move a stack of layers, by where its result lies."""

    def __init__(self, setup: Setup) -> None:
        self._numbers, self._is_in_order = _numbers(setup), is_in_order(setup)
        num_absent = np.sum(self._numbers < 0)
        self._places = np.argsort(self._numbers, axis=None, stable=True)[num_absent:]
        self.copied = cache(partial(compiled, setup, jnp.copy))
        self._ordered = cache(partial(compiled, setup, self._order))
        self._placed = cache(partial(compiled, setup, self._place))

    def in_order(self, x: jax.Array, where: NamedSharding) -> jax.Array:
        """[L, ...] of a stack as it lies on ranks, such as [R, S, layers, ...], which it deletes.

        Args:
            x: The stack.
            where: How the result lies.
        """
        if not self._is_in_order:
            x = _deleting(self.copied(self._whole_layers(where)), x)
        return _deleting(self._ordered(where), x)

    def to_ranks(self, x: jax.Array, where: NamedSharding, wanted: NamedSharding) -> jax.Array:
        """The inverse of `in_order`.

        Args:
            x: [L, ...], which is deleted.
            where: How it lies.
            wanted: How the result lies.
        """
        if self._is_in_order:
            return _deleting(self._placed(wanted), x)
        x = _deleting(self._placed(self._whole_layers(where)), x)
        return _deleting(self.copied(wanted), x)

    def _whole_layers(self, where: NamedSharding) -> NamedSharding:
        """How a stack on ranks lies if its other dims are divided so, and it is in no other way.

        From there to forward order and back every device needs what it has.
        """
        dims = (None,) * self._numbers.ndim
        return NamedSharding(where.mesh, PartitionSpec(*dims, *where.spec[1:]))

    def _order(self, x: jax.Array) -> jax.Array:
        x = x.reshape(self._numbers.size, *x.shape[self._numbers.ndim :])
        return x if self._is_in_order else x[self._places]

    def _place(self, x: jax.Array) -> jax.Array:
        numbers = self._numbers.ravel()
        if not self._is_in_order:
            x = models.where_present(x[numbers], numbers)
        return x.reshape(*self._numbers.shape, *x.shape[1:])


def is_in_order(setup: Setup) -> bool:
    """Whether a stack on ranks is one in forward order, divided over the ranks."""
    numbers = _numbers(setup)
    ranks_first = setup.stages_apart or setup.layout.num_repeats == 1
    return ranks_first and np.array_equal(numbers.ravel(), np.arange(numbers.size))


def delete(tree: PyTree, *, once: PyTree) -> None:
    """Deletes arrays on devices when those that were made of them are there."""
    jax.block_until_ready(once)
    for x in jax.tree.leaves(tree):
        if not isinstance(x, np.ndarray):
            x.delete()


def _deleting(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    found = move(x)
    delete(x, once=found)
    return found


def _numbers(setup: Setup) -> Int[np.ndarray, "..."]:
    """Of every place of a stack on ranks the number of its layer, or -1 if it has none."""
    if setup.stages_apart:
        return layers_of_ranks(setup)
    return np.array(setup.layout.numbers, int).reshape(setup.layout.dims)


def compiled(setup: Setup, f: Callable[..., PyTree], where: PyTree) -> Callable[..., PyTree]:
    """`f` for arrays on `setup.mesh`, whose explicit axes do not follow when layers move."""
    work: Any = f
    if setup.config.shard_mode == "explicit":
        work = jax.sharding.auto_axes(f, out_sharding=jax.tree.map(_on_explicit_axes, where))
    program = jax.jit(work, out_shardings=where)

    def run(*arrays: jax.Array) -> PyTree:
        with jax.set_mesh(setup.mesh):
            return program(*arrays)

    return run


def _on_explicit_axes(where: NamedSharding) -> NamedSharding:
    """What a type says of `where`."""
    kinds = dict(zip(where.mesh.axis_names, where.mesh.axis_types, strict=True))

    def explicit(dim: Any) -> tuple[str, ...] | None:
        names = (dim,) if isinstance(dim, str) else dim or ()
        return tuple(name for name in names if kinds[name] is AxisType.Explicit) or None

    return NamedSharding(where.mesh, PartitionSpec(*map(explicit, where.spec)))
