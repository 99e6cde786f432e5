"""Gathers the weights of a rank while it runs its repeats, in the way that a `Gather` names.

Weights are gathered in every tick, once per repeat, or once: three implementations of one contract.
`prefetch` gathers the weights of a repeat before it begins, for all ranks at once. A rank makes its
`window` of them when it begins the repeat, and holds it until the repeat ends. In a tick, `unshard`
returns the weights in the window for the stage, and `accumulate` adds their gradients in float32;
`reduce_scatter` sums the gradients of a repeat over devices at its end.

|        | prefetch | window               | unshard | accumulate      | reduce_scatter  |
|--------|----------|----------------------|---------|-----------------|-----------------|
| tick   |          | as stored            | gathers | reduce-scatters |                 |
| repeat | gathers  | result of `prefetch` |         |                 | reduce-scatters |
| once   |          | of a gathered copy   |         |                 | reduce-scatters |
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ...autodiff.backward import floating
from ...autodiff.staged_model import index_leading
from .._buffers import over_leading, to_accum_dtype
from ..ranks import zeros
from ._gather import Gather, TreeFunction, identity


class RepeatGather(NamedTuple):
    """Functions that gather the weights of one rank, by the table above, and initial gradients.

    Attributes:
        prefetch: Maps the index of a repeat to the weights gathered before any rank begins it.
        window: Maps these and the index to the weights that the rank holds during the repeat.
        unshard: Maps a window to the weights that a stage reads.
        accumulate: Maps a sum of float32 gradients over ticks, and the gradients of the weights
            that a stage read, to their sum.
        reduce_scatter: Maps a repeat's sum of gradients to gradients sharded as they are stored.
        zeros: Maps a window to the initial sum, zeros.
        zero_gradients: Maps a number of repeats to zero gradients as stored, with that dim in
            front.
    """

    prefetch: Callable[[Any], PyTree]
    window: Callable[[PyTree, Any], PyTree]
    unshard: TreeFunction
    accumulate: Callable[[PyTree, PyTree], PyTree]
    reduce_scatter: TreeFunction
    zeros: TreeFunction
    zero_gradients: Callable[[int], PyTree]


def repeat_gather(gather: Gather, weights: PyTree) -> RepeatGather:
    """Returns the functions of `RepeatGather` for weights with [R, ...] leaves."""

    def stored(repeat: Any) -> PyTree:
        return index_leading(weights, repeat)

    def gathered(w: PyTree) -> PyTree:
        return gather.unshard(gather.cast(w))

    def unsharded_gradient(dw: PyTree) -> PyTree:
        return gather.constrain_unsharded(to_accum_dtype(dw))

    def scattered_gradient(dw: PyTree) -> PyTree:
        return gather.reduce_scatter(to_accum_dtype(dw))

    prefetch: Callable[[Any], PyTree] = lambda repeat: ()  # noqa: E731
    unshard, to_sum, reduce_scatter = identity, unsharded_gradient, gather.reduce_scatter
    match gather.when:
        case "tick":
            window = lambda _, j: stored(j)  # noqa: E731
            unshard, to_sum, reduce_scatter = gathered, scattered_gradient, identity
        case "repeat":
            prefetch = lambda j: gathered(stored(j))  # noqa: E731
            window = lambda prefetched, _: prefetched  # noqa: E731
        case "once":
            copy = over_leading(gathered, weights)
            window = lambda _, j: index_leading(copy, j)  # noqa: E731

    def accumulate(total: PyTree, dw: PyTree) -> PyTree:
        return jax.tree.map(jnp.add, total, to_sum(dw))

    # Only the types of what these two compute are used.
    def zero_sum(w: PyTree) -> PyTree:
        return jax.tree.map(zeros, to_sum(floating(unshard(w))))

    def zero_gradients(num_repeats: int) -> PyTree:
        scattered = reduce_scatter(zero_sum(window(prefetch(0), 0)))
        return jax.tree.map(lambda x: zeros(x, lead=(num_repeats,)), scattered)

    return RepeatGather(
        prefetch, window, unshard, accumulate, reduce_scatter, zero_sum, zero_gradients
    )
