"""The sliding window of weights on whole arrays, for a pipeline that is driven by hand.

While rank 0 is in repeat r, no rank is in another repeat than r - 1 or r. The window holds both,
whole: [2, S, ...] leaves, entry 0 of repeat r - 1, entry 1 of repeat r.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from ._iteration import Counts, microbatch_and_repeat_ids


def repeat_weights(weights: PyTree, t: int | Int[Array, ""], counts: Counts) -> PyTree:
    """[R, S, ...] -> [S, ...]: all stages of the repeat in which rank 0 is at iteration `t`.

    Before the first and after the last repeat, those of the first and the last.
    """
    repeat = jnp.clip(t // counts.num_microbatches, 0, counts.num_repeats - 1)
    return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, repeat, keepdims=False), weights)


def window_at(
    weights: PyTree, t: int | Int[Array, ""], counts: Counts, gather: Callable[[PyTree], PyTree]
) -> PyTree:
    """The window for iteration `t`. It stays the same while `t // M` does.

    Args:
        weights: [R, S, ...] leaves.
        t: The iteration.
        counts: The sizes.
        gather: Makes the [S, ...] weights of a repeat whole.
    """
    previous = gather(repeat_weights(weights, t - counts.num_microbatches, counts))
    current = gather(repeat_weights(weights, t, counts))
    return jax.tree.map(lambda *blocks: jnp.stack(blocks), previous, current)


def empty_window(weights: PyTree) -> PyTree:
    """Zeros like a window of these [R, S, ...] weights."""
    return jax.tree.map(lambda w: jnp.zeros((2, *w.shape[1:]), w.dtype), weights)


def from_window(window: PyTree, t: int | Int[Array, ""], counts: Counts) -> PyTree:
    """[2, S, ...] -> [S, ...]: what every rank works with at iteration `t`."""
    _, repeats = microbatch_and_repeat_ids(t, counts)

    def choose(blocks):
        is_current = (repeats == repeats[0]).reshape(-1, *[1] * (blocks.ndim - 2))
        return jnp.where(is_current, blocks[1], blocks[0])

    return jax.tree.map(choose, window)
