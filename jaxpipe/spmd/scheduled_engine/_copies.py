"""Copies of weights between ranks, for schedules that run a stage on several of them.

Weights are stored once. Before the first tick a rank receives the weights of the stages that it
runs and does not store, in one permutation of the ranks where, as in DualPipe, it copies one stage;
after the last tick the gradients of copies are sent back and added. Shards over other axes are sent
as they are stored.

v chunks that a rank stores, c chunks that it runs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree, Shaped

from ...autodiff.staged_model import index_leading
from ...schedules.lock_step import WeightCopies
from .._buffers import put
from ..ranks import AXIS


def receive_copies(
    stored: PyTree[Shaped[Array, "v ..."]], copies: WeightCopies | None
) -> PyTree[Shaped[Array, "c ..."]]:
    """Returns the chunks that this rank runs."""
    if copies is None:
        return stored
    chunks = _of_rank(copies.chunks, axis=1)

    def receive(leaf: jax.Array) -> jax.Array:
        run = [index_leading(leaf, jnp.maximum(chunk, 0)) for chunk in chunks]
        for sent in copies.rounds:
            received = _permute(index_leading(leaf, _of_rank(sent.stored_chunks)), sent.receivers)
            target = _of_rank(sent.copied_chunks)
            run = [jnp.where(target == chunk, received, w) for chunk, w in enumerate(run)]
        return jnp.stack(run)

    return jax.tree.map(_on_key_data(receive), stored)


def return_gradients(
    gradients: PyTree[Shaped[Array, "c ..."]], copies: WeightCopies | None
) -> PyTree[Shaped[Array, "v ..."]]:
    """Returns the gradients of the chunks that this rank stores, summed over all ranks."""
    if copies is None:
        return gradients
    run_chunks = _of_rank(_run_chunks(copies), axis=1)

    def give_back(leaf: jax.Array) -> jax.Array:
        total = _take(leaf, run_chunks)
        for sent in copies.rounds:
            target, source = _of_rank(sent.copied_chunks), _of_rank(sent.stored_chunks)
            own = index_leading(leaf, target)
            senders = tuple(sent.receivers.index(rank) for rank in range(len(sent.receivers)))
            returned = _permute(jnp.where(target >= 0, own, jnp.zeros_like(own)), senders)
            total = put(total, index_leading(total, source) + returned, source)
        return total

    return jax.tree.map(give_back, gradients)


def _run_chunks(copies: WeightCopies) -> list[list[int]]:
    """Returns [v][ranks]: which of the chunks that a rank runs each chunk is that it stores."""
    by_rank = list(zip(*copies.chunks, strict=True))
    num_stored = 1 + max(by_rank[0])
    return [[chunks.index(stored) for chunks in by_rank] for stored in range(num_stored)]


def _take(leaf: jax.Array, chunks: jax.Array) -> jax.Array:
    return jnp.stack([index_leading(leaf, chunk) for chunk in chunks])


def _permute(x: jax.Array, receivers: tuple[int, ...]) -> jax.Array:
    return lax.ppermute(x, AXIS, list(enumerate(receivers)))


def _of_rank(table: Any, axis: int = 0) -> jax.Array:
    """Returns this rank's entry of a table of integers, along the dim of ranks."""
    return jnp.take(jnp.asarray(table, jnp.int32), lax.axis_index(AXIS), axis=axis)


def _on_key_data(f: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that applies `f` to the integers of random keys, which ranks can send."""

    def apply(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return f(leaf)
        return jax.random.wrap_key_data(
            f(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf)
        )

    return apply
