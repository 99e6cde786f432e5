"""Buffers that a loop over ticks carries: allocation, writes in place, and dtypes of gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, PyTree

from ..autodiff.staged_model import accum_dtype
from ..ir.transforms import cast_of_gradient
from .ranks import AXIS, empty


def allocate_buffer(x: Any, length: int) -> jax.Array:
    """Allocates a buffer [length, ...] like the abstract value `x`, in its memory space.

    TPUs and GPUs do not fill it, so an entry must be written before it is read.
    """
    buffer = empty(x, length)
    if not is_on_host(x):
        return buffer
    if AXIS not in jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            "`remat` offloads, but without a `mesh` one device plays all ranks, and JAX cannot "
            "index into the host's memory for several of them. Give a mesh, or a policy that "
            "keeps tensors on the device."
        )
    return jax.device_put(buffer, jax.memory.Space.Host)


def type_of(x: Any) -> Any:
    """Returns the abstract value of an array; an abstract value is returned as it is."""
    return jax.typeof(x) if isinstance(x, jax.Array) else x


def is_on_host(x: Any) -> bool:
    """Returns whether an array, or what an abstract value describes, is in the host's memory."""
    return type_of(x).memory_space == jax.memory.Space.Host


def put(buffer: PyTree, x: PyTree, index: Any) -> PyTree:
    """Writes `x` to entry `index` of dim 0 of every leaf of `buffer`."""
    return jax.tree.map(
        lambda b, new: lax.dynamic_update_index_in_dim(b, new, index, axis=0), buffer, x
    )


def add_trees(a: PyTree, b: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, a, b)


def to_accum_dtype(tree: PyTree, *, apart: bool = True) -> PyTree:
    """Casts to float32 if narrower: the dtype in which gradients are summed over microbatches.

    With `apart` the casts may be operations of their own (`cast_of_gradient`), as is best if sums
    are added to next. Otherwise a product may write float32 at once.
    """

    def widen(x: jax.Array) -> jax.Array:
        dtype = accum_dtype(x.dtype)
        return cast_of_gradient(x, dtype) if apart else x.astype(dtype)

    return jax.tree.map(widen, tree)


def cast_like(gradients: PyTree, weights: PyTree) -> PyTree:
    """Casts accumulated gradients to the dtypes of their weights."""
    return jax.tree.map(lambda g, w: g.astype(w.dtype), gradients, weights)


def over_leading(f: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
    """Applies `f` to each entry of dim 0 of the leaves; a tree without leaves is returned as is."""
    return jax.vmap(f)(tree) if jax.tree.leaves(tree) else tree


def own_entries(tree: PyTree) -> PyTree:
    """Returns this rank's [n, ...] of [M, ...] leaves; n is M / S, rounded up.

    A rank has zeros in place of what another rank has, and returns zeros behind the last entry.
    """
    ranks = lax.axis_size(AXIS)

    def scatter(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(
                scatter(jax.random.key_data(x)), impl=jax.random.key_impl(x)
            )
        padding = [(0, -x.shape[0] % ranks)] + [(0, 0)] * (x.ndim - 1)
        wide = jnp.pad(x.astype(_summable(x.dtype)), padding)
        return lax.psum_scatter(wide, AXIS, tiled=True).astype(x.dtype)

    return jax.tree.map(scatter, tree)


def _summable(dtype: Any) -> Any:
    """Returns a dtype in which the sum of a value and zeros is the value."""
    if dtype == jnp.bool_:
        return jnp.int32
    # XLA:CPU aborts on a psum of bfloat16 (AllReducePromotion, jax 0.10.2).
    return jnp.float32 if dtype == jnp.bfloat16 else dtype


def broadcast(is_source: Bool[Array, ""], x: jax.Array) -> jax.Array:
    """Broadcasts `x` from one rank to all, by an exact sum with zeros."""
    alone = jnp.where(is_source, x, jnp.zeros_like(x))
    return lax.psum(alone.astype(_summable(x.dtype)), AXIS).astype(x.dtype)
