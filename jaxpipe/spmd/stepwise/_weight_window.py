"""The sliding window of weights on whole arrays, for a pipeline that is driven by hand.

While rank 0 is in repeat r, no rank is in another repeat than r - 1 or r. The window holds both,
gathered: [2, S, ...] leaves, entry 0 of repeat r - 1, entry 1 of repeat r. `WeightGather.prefetch`
gathers both.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from ..circular_engine import PipelineShape
from ..weight_gather import WeightGather


def repeat_of_rank_0(t: int | Int[Array, ""], shape: PipelineShape) -> Int[Array, " S"]:
    """Returns [S] the repeat, in range, that rank 0 runs at iteration `t`."""
    repeat = jnp.clip(t // shape.num_microbatches, 0, shape.num_repeats - 1)
    return jnp.broadcast_to(repeat, (shape.num_ranks,))


def window_at(gather: WeightGather, t: int | Int[Array, ""], shape: PipelineShape) -> PyTree:
    """Returns the [2, S, ...] window for the repeat that rank 0 begins at iteration `t`.

    `gather` has the functions of whole weights; its `prefetch` takes an iteration, and returns the
    [S, ...] weights of the repeat that rank 0 runs then.
    """
    repeats = gather.prefetch(t - shape.num_microbatches), gather.prefetch(t)
    return jax.tree.map(lambda *halves: jnp.stack(halves), *repeats)


def empty_window(weights: PyTree) -> PyTree:
    """Returns zeros like a window of these [R, S, ...] weights."""
    return jax.tree.map(lambda w: jnp.zeros((2, *w.shape[1:]), w.dtype), weights)


def from_window(window: PyTree, repeats: Int[Array, " S"]) -> PyTree:
    """Returns the [S, ...] weights of all ranks out of a [2, S, ...] window."""

    def choose(blocks):
        is_current = (repeats == repeats[0]).reshape(-1, *[1] * (blocks.ndim - 2))
        return jnp.where(is_current, blocks[1], blocks[0])

    return jax.tree.map(choose, window)
