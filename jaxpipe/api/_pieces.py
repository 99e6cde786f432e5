"""Pieces of a batch: M microbatches, of each of which D devices have some rows.

A function of the model runs on one piece. An engine of one program runs it on every device with the
piece of the device; the others compute all D pieces in one program, which XLA divides. A schedule
with s slices of each sequence has M * s pieces of each device.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..autodiff.staged_model import slice_sequences
from ..engines.fsdp import row_axes
from ..kernels import vmap_over_devices
from ..sharding import automatic_axes

_LENGTH_DIM = 3
"""The dim of positions in leaves [M, D, rows, T, ...]."""


def to_pieces(batch: PyTree, num_microbatches: int, num_shards: int) -> PyTree:
    """Splits a batch [B, ...] into pieces of consecutive rows, [M, D, B / (M * D), ...]."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise ValueError("`batch` has no arrays. Give a pytree of arrays [rows, ...].")
    rows = jnp.shape(leaves[0][1])[:1]
    for path, leaf in leaves:
        if not jnp.shape(leaf) or jnp.shape(leaf)[:1] != rows:
            raise ValueError(
                f"`batch{_name(path)}` has shape {jnp.shape(leaf)} and "
                f"`batch{_name(leaves[0][0])}` {jnp.shape(leaves[0][1])}. All leaves must have the "
                "same number of rows, dim 0."
            )
    if rows[0] % (num_microbatches * num_shards):
        shards = f" x {num_shards} devices of the axes data and fsdp" if num_shards > 1 else ""
        raise ValueError(
            f"`batch` has {rows[0]} rows, which do not divide into {num_microbatches} "
            f"microbatches (`microbatches` times `accumulate`){shards}. Change one of them."
        )
    shape = num_microbatches, num_shards, rows[0] // (num_microbatches * num_shards)
    return jax.tree.map(lambda leaf: jnp.reshape(leaf, (*shape, *jnp.shape(leaf)[1:])), batch)


def num_rows(batch: PyTree) -> int:
    """Returns the rows of a batch or of a piece, [rows, ...] leaves."""
    return jnp.shape(jax.tree.leaves(batch)[0])[0]


def shape_of(leaf: Any, skipped: int = 0) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array, without its first dims."""
    return jax.ShapeDtypeStruct(jnp.shape(leaf)[skipped:], jnp.result_type(leaf))


def with_sharding(leaf: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array that has this sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path)


def on_pieces(function: Callable, num_shared: int, *arguments: PyTree) -> PyTree:
    """Runs a function on each of d pieces; arguments behind the shared ones are [d, ...]."""
    shared, pieces = arguments[:num_shared], arguments[num_shared:]
    if jax.tree.leaves(pieces)[0].shape[0] == 1:
        result = function(*shared, *jax.tree.map(lambda x: x[0], pieces))
        return jax.tree.map(lambda x: jnp.asarray(x)[None], result)
    axes = (None,) * num_shared + (0,) * len(pieces)
    free = automatic_axes()
    rows = [axis for axis in row_axes(jax.sharding.get_abstract_mesh()) if axis in free]
    with vmap_over_devices(tuple(rows)):
        return jax.vmap(function, in_axes=axes)(*arguments)


def sum_pieces(tree: PyTree) -> PyTree:
    """Returns the sums over dim 0, the pieces."""
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), tree)


def to_slices(pieces: PyTree, num_slices: int, sliced_leaves: PyTree) -> PyTree:
    """Cuts sequences of pieces [M, D, rows, ...] into slices, [M * s, D, rows, ...] in order.

    Leaves without a sequence are repeated for every slice.
    """
    if num_slices == 1:
        return pieces
    leaves, structure = jax.tree_util.tree_flatten_with_path(pieces)
    chosen = _chosen(pieces, sliced_leaves)
    for (path, leaf), is_sliced in zip(leaves, chosen, strict=True):
        if is_sliced and jnp.ndim(leaf) <= _LENGTH_DIM:
            raise ValueError(
                f"`Model.sliced_leaves` is true for `batch{_name(path)}`, which has no dim 1. Name "
                "leaves [rows, T, ...] only."
            )
    lengths = {
        _name(path): jnp.shape(leaf)[_LENGTH_DIM]
        for (path, leaf), is_sliced in zip(leaves, chosen, strict=True)
        if is_sliced
    }
    named = ", ".join(f"`batch{name}` {length}" for name, length in lengths.items())
    if len(set(lengths.values())) != 1:
        raise ValueError(
            f"`schedule` cuts sequences into {num_slices} slices, and the leaves of `batch` have "
            f"different lengths in dim 1: {named or 'there are none'}. Name those with a sequence "
            "by `Model(sliced_leaves=...)`, booleans in a tree like `batch`."
        )
    if next(iter(lengths.values())) % num_slices:
        raise ValueError(
            f"`schedule` cuts sequences into {num_slices} slices, which do not divide their "
            f"lengths: {named}. Slices are equally long: change the lengths or the slices."
        )

    def cut(leaf: Any, is_sliced: bool) -> jax.Array:
        if is_sliced:
            return slice_sequences(jnp.asarray(leaf), num_slices, _LENGTH_DIM)
        return jnp.repeat(leaf, num_slices, axis=0)

    cut_leaves = [cut(leaf, is_sliced) for (_, leaf), is_sliced in zip(leaves, chosen, strict=True)]
    return structure.unflatten(cut_leaves)


def _chosen(pieces: PyTree, sliced_leaves: PyTree) -> list[bool]:
    """Returns for every leaf whether it has a sequence."""
    if sliced_leaves is None:
        return [jnp.ndim(leaf) > _LENGTH_DIM for leaf in jax.tree.leaves(pieces)]
    try:
        whole = jax.tree.map(
            lambda flag, part: jax.tree.map(lambda _: flag, part), sliced_leaves, pieces
        )
    except ValueError as error:
        raise ValueError(
            f"`Model.sliced_leaves` is no prefix of the tree of `batch`: {error}"
        ) from None
    return jax.tree.leaves(whole)
