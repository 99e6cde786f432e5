"""Functions of one rank, run by all ranks: on a mesh, or one device playing every rank.

The same function runs both ways, so every pipeline has a one-device twin to test against.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

AXIS = "stage"


def on_ranks(f: Callable, *, mesh: Mesh | None, in_dims: tuple, out_dims: Any) -> Callable:
    """Maps `f`, written for one rank inside the axis `stage`, over the ranks.

    Args:
        f: A function of arrays of one rank. It may use collectives over `stage`.
        mesh: A mesh with the axis `stage`; its other axes stay automatic. None runs all ranks on
            one device, under `jax.vmap`.
        in_dims: For each argument the dim, of size S, that holds one slice per rank and that `f`
            does not see; None if every rank gets the whole argument. An argument may have a tree of
            these.
        out_dims: The same for the result. None: every rank returns the same, as `psum` does.

    Returns:
        A function of whole arrays.
    """
    if mesh is None:
        return jax.vmap(f, axis_name=AXIS, in_axes=in_dims, out_axes=out_dims)

    def local(*arguments):
        seen = [_each(x, dim, _drop, _vary) for x, dim in zip(arguments, in_dims, strict=True)]
        return _each(f(*seen), out_dims, _add, lambda x: x)

    return jax.shard_map(
        local,
        mesh=mesh,
        axis_names={AXIS},
        in_specs=tuple(_specs(dim) for dim in in_dims),
        out_specs=_specs(out_dims),
    )


def _is_dim(x: Any) -> bool:
    return x is None or isinstance(x, int)


def _specs(dims: Any) -> Any:
    def spec(dim):
        return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, AXIS)

    return jax.tree.map(spec, dims, is_leaf=_is_dim)


def _each(tree: Any, dims: Any, with_dim: Callable, without: Callable) -> Any:
    """`with_dim(leaf, dim)` where the prefix tree `dims` has a dim, `without(leaf)` elsewhere."""

    def below(dim, subtree):
        return jax.tree.map(lambda x: without(x) if dim is None else with_dim(x, dim), subtree)

    return jax.tree.map(below, dims, tree, is_leaf=_is_dim)


def _vary(x: jax.Array) -> jax.Array:
    """Marks what all ranks share as varying, so that its gradient is summed over ranks here, once.

    Otherwise JAX sums at every use, in a loop as often as it runs, and in the dtype of the use.
    Sums of bfloat16 are made in float32: for precision, and because XLA:CPU fails on the others.
    """
    wide = x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
    return jax.lax.pcast(wide, AXIS, to="varying").astype(x.dtype)


def _drop(x: jax.Array, dim: int) -> jax.Array:
    return jax.lax.squeeze(x, [dim])


def _add(x: jax.Array, dim: int) -> jax.Array:
    return jax.lax.expand_dims(x, [dim])
