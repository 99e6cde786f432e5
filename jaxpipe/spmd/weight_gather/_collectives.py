"""Gathers and sums of one array over manual axes, while automatic axes stay as they are."""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from ... import _compat
from ...sharding import GATHERED_AXES
from ...sharding.specs import axes_of, axes_of_dim, only_axes

ArrayFunction = Callable[[jax.Array], jax.Array]


def all_gather_leaf(
    x: jax.Array, stored: PartitionSpec, gathered: PartitionSpec, unsharded: PartitionSpec
) -> jax.Array:
    """Returns `x` gathered over manual axes, from `stored` to `gathered`.

    Automatic axes shard it as in `unsharded`, before and after.
    """
    moved = [
        tuple(axis for axis in axes_of_dim(axes) if axis not in axes_of_dim(rest))
        for axes, rest in zip(stored, gathered, strict=True)
    ]

    def gather(x: jax.Array) -> jax.Array:
        for dim, axes in enumerate(moved):
            x = lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x
        return x

    return _on_shards(gather, x, unsharded, moved=moved)


def reduce_scatter_leaf(
    axes: tuple[str, ...],
    x: jax.Array,
    spec: PartitionSpec,
    unsharded: PartitionSpec,
    *,
    as_rows: bool = False,
    dtype: Any = None,
) -> jax.Array:
    """Returns to each device of `axes` its shard of the sum over these devices.

    Automatic axes shard it as in `unsharded`, before and after. `as_rows` is for an array that is
    stored with its last dim as rows. What is sent is rounded to `dtype`, if it is not None.
    """
    rest = tuple(axis for axis in axes if axis not in axes_of(spec))
    sizes = jax.sharding.get_abstract_mesh().shape
    if all(sizes[axis] == 1 for axis in (*axes_of(spec), *rest)):
        dtype = None  # nothing is sent

    scatter = _scatter_rows if as_rows else _scatter

    def sum_up(x: jax.Array) -> jax.Array:
        total = _rounded(x, dtype)
        for dim, names in enumerate(spec):
            total = scatter(total, names, dim) if names else total
        total = lax.psum(total, rest) if rest else total
        return _rounded(total, dtype).astype(x.dtype)

    # If XLA sees that a sum is sharded later, it shards the sum inside the loop that accumulates
    # it, with one reduce-scatter per tick. The boundary of a `shard_map` over the automatic axes
    # (`also`) keeps partial sums on their devices until the loop has ended.
    return _on_shards(sum_up, x, unsharded, moved=[*map(axes_of_dim, spec)], also=GATHERED_AXES)


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns `x` in a dtype, or rounded to what that has; `x` if the dtype is None."""
    if dtype is None:
        return x
    if _compat.platform() != "cpu":
        # Without the barrier XLA:TPU (libtpu 0.0.48.1) scatters float32 where a product wrote `x`.
        return lax.optimization_barrier(x.astype(dtype))
    # XLA:CPU aborts on sums of bfloat16 ("Invalid binary instruction opcode copy"), which it would
    # add up in float32, and drops casts to it and back.
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


def _scatter(x: jax.Array, axes: Any, dim: int) -> jax.Array:
    """Returns the shards along `dim` of the sum over `axes`."""
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


def _scatter_rows(x: jax.Array, axes: Any, dim: int) -> jax.Array:
    """Does the same. The dim and all behind it but the last are seen as one.

    XLA:TPU (libtpu 0.0.48.1) sums whole arrays, twice the bytes, if a dim is none of the last two.
    """
    if dim >= x.ndim - 2:
        return _scatter(x, axes, dim)
    lead, behind = x.shape[:dim], x.shape[dim + 1 :]
    rows = x.reshape(*lead, math.prod(x.shape[dim:-1]), x.shape[-1])
    shard = _scatter(rows, axes, dim)
    return shard.reshape(*lead, x.shape[dim] * shard.size // max(rows.size, 1), *behind)


def _on_shards(
    f: ArrayFunction,
    x: jax.Array,
    unsharded: PartitionSpec,
    *,
    moved: Sequence[tuple[str, ...]],
    also: Collection[str] = (),
) -> jax.Array:
    """Applies `f`, which communicates over manual axes, to shards over the automatic axes.

    A dim that is sharded over both kinds of axes is left to the partitioner. `also` are axes that
    do not shard `x`, but become manual around `f`.
    """
    # XLA's partitioner (jax 0.10.2 and 0.12.0, CPU and TPU) gathers the operand of a manual
    # collective over automatic axes and shards the result again: exact, and several times the
    # memory.
    mesh = jax.sharding.get_abstract_mesh()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    automatic = {a for a, kind in types if kind == AxisType.Auto and mesh.shape[a] > 1}
    spec, extra_axes = only_axes(unsharded, automatic), automatic.intersection(also)
    if any(names and axes for names, axes in zip(spec, moved, strict=True)):
        return f(_inside(lambda x: x, x, PartitionSpec(), extra_axes))
    split = axes_of(spec)
    axes = extra_axes | split if any(moved) or extra_axes else extra_axes
    return _inside(f, x, spec, axes)


def _inside(f: ArrayFunction, x: jax.Array, spec: PartitionSpec, axes: set[str]) -> jax.Array:
    """Applies `f` to shards over `axes`."""
    if not axes:
        return f(x)
    return jax.shard_map(f, in_specs=spec, out_specs=spec, axis_names=axes)(x)
