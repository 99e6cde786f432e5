"""The sliding window of weights on whole arrays, for a pipeline that is driven by hand.

While rank 0 is in repeat r, no rank is in another repeat than r - 1 or r. The window holds both,
gathered: [2, S, ...] leaves, entry 0 of repeat r - 1, entry 1 of repeat r.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from ..circular_engine import PipelineShape
from ._iteration import microbatch_and_repeat_ids


def repeat_weights(weights: PyTree, t: int | Int[Array, ""], shape: PipelineShape) -> PyTree:
    """Returns the [S, ...] weights of all stages of the repeat that rank 0 runs at iteration `t`.

    `weights` has [R, S, ...] leaves. Before the first repeat the result is that of the first, and
    after the last repeat that of the last.
    """
    repeat = jnp.clip(t // shape.num_microbatches, 0, shape.num_repeats - 1)
    return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, repeat, keepdims=False), weights)


def window_at(
    weights: PyTree,
    t: int | Int[Array, ""],
    shape: PipelineShape,
    gather: Callable[[PyTree], PyTree],
) -> PyTree:
    """Returns the window for iteration `t`, which is the same for all `t` of equal `t // M`.

    Args:
        weights: [R, S, ...] leaves.
        t: The iteration.
        shape: The sizes of the pipeline.
        gather: Gathers the [S, ...] weights of a repeat.

    Returns:
        [2, S, ...] leaves: the weights of the repeat before that of rank 0, and of that repeat.
    """
    previous = gather(repeat_weights(weights, t - shape.num_microbatches, shape))
    current = gather(repeat_weights(weights, t, shape))
    return jax.tree.map(lambda *blocks: jnp.stack(blocks), previous, current)


def empty_window(weights: PyTree) -> PyTree:
    """Returns zeros like a window of these [R, S, ...] weights."""
    return jax.tree.map(lambda w: jnp.zeros((2, *w.shape[1:]), w.dtype), weights)


def from_window(window: PyTree, t: int | Int[Array, ""], shape: PipelineShape) -> PyTree:
    """Returns the [S, ...] weights of all ranks at iteration `t`, out of a [2, S, ...] window."""
    _, repeats = microbatch_and_repeat_ids(t, shape)

    def choose(blocks):
        is_current = (repeats == repeats[0]).reshape(-1, *[1] * (blocks.ndim - 2))
        return jnp.where(is_current, blocks[1], blocks[0])

    return jax.tree.map(choose, window)
