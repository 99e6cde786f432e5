"""What devices that hold slices of a sequence exchange, so that each runs a kernel on its part.

Keys and values are gathered; queries stay, but for half of them where a causal mask would leave
the first device almost nothing to do. Every collective is one of groups of devices, because an
engine may run it in a branch that other ranks do not take: for a permute all of them would wait.

n devices, a sequence of T tokens in slices of t = T / n.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from ._scores import Placement, Scores, Segments, same_tokens

Kernel = Callable[..., jax.Array]
"""`(scores, q [b, t, H, C], k [b, u, K, C], v [b, u, K, V], sinks [H] or None, segments or None,
placement) -> out [b, t, H, V]`, attention on one device."""

_QUARTERS = [0, 3, 1, 2]
"""The order of quarters of a slice: those of the first of a pair, then those of the second."""


def on_slices(
    kernel: Kernel, scores: Scores, axis: str | None, size: int, granularity: int
) -> Callable[[Any, Any], jax.Array]:
    """Returns attention of one device, which has a slice of every sequence.

    Args:
        axis: The manual axis that sequences are split over. None: a device has whole sequences.
        size: n, the size of the axis.
        granularity: Runs of queries and parts of slices are multiples of so many tokens.

    Returns:
        `((q, k, v, sinks or None), segment_ids or None) -> out`, all of the slice of this device.
    """

    def attend(inputs: tuple, segment_ids: Int[Array, "b t"] | None) -> jax.Array:
        q, k, v, sinks = inputs
        run = partial(kernel, scores)
        if axis is None or size == 1:
            segments = None if segment_ids is None else (segment_ids, segment_ids)
            return run(q, k, v, sinks, segments, same_tokens(q.shape[1]))
        tail = tail_length(scores, q.shape[1], granularity)
        if tail is not None:
            return _with_tails(run, q, k, v, sinks, segment_ids, axis, size, tail)
        gather = partial(lax.all_gather, axis_name=axis, axis=1, tiled=True)
        where = balanced if balances(scores, q.shape[1], size, granularity) else _in_order
        placement = where(q.shape[1], size, lax.axis_index(axis))
        of_keys = None if segment_ids is None else gather(segment_ids)
        segments = None if of_keys is None else (_of_queries(of_keys, placement), of_keys)
        keys_and_values = gather(k), gather(v)
        if where is _in_order:
            return run(q, *keys_and_values, sinks, segments, placement)
        out = run(_swap_queries(q, axis, size), *keys_and_values, sinks, segments, placement)
        return _swap_back(out, axis, size)

    return attend


def tail_length(scores: Scores, length: int, granularity: int) -> int | None:
    """Returns the tokens before its slice that a device sees, if they are at most another slice."""
    if scores.window is None or not scores.causal:
        return None
    tail = -(-(scores.window - 1) // granularity) * granularity
    return tail if 0 < tail <= length else None


def balances(scores: Scores, length: int, size: int, granularity: int) -> bool:
    """Returns whether pairs of devices exchange queries, so that all have the same work."""
    # Without a mask, or within a window, all have it anyway.
    is_uneven = scores.causal and scores.window is None
    return is_uneven and size % 2 == 0 and length % (4 * granularity) == 0


def _in_order(length: int, size: int, device: Array) -> Placement:
    return Placement(length * np.arange(size)[:, None], length, size * length, device)


def balanced(length: int, size: int, device: Array | int) -> Placement:
    """Returns where queries lie that `_swap_queries` has moved.

    The first device sees few keys and the last one all, so they share their queries: of the
    quarters of both slices one takes the first and the last, the other one those between.
    """
    quarter = length // 4
    starts = np.empty((size, 4), np.int32)
    for first, second in _pairs(size):
        for member, quarters in ((first, (0, 3)), (second, (1, 2))):
            starts[member] = [length * d + quarter * i for d in (first, second) for i in quarters]
    return Placement(starts, quarter, size * length, device)


def _pairs(size: int) -> list[list[int]]:
    return [[d, size - 1 - d] for d in range(size // 2)]


def _swap_queries(x: jax.Array, axis: str, size: int) -> jax.Array:
    """Exchanges half of a slice [b, t, ...] within pairs of devices."""
    return _swap(_reordered(x, _QUARTERS), axis, size)


def _swap_back(x: jax.Array, axis: str, size: int) -> jax.Array:
    return _reordered(_swap(x, axis, size), [_QUARTERS.index(i) for i in range(4)])


def _reordered(x: jax.Array, order: list[int]) -> jax.Array:
    quarters = jnp.split(x, 4, axis=1)
    return jnp.concatenate([quarters[i] for i in order], axis=1)


def _swap(x: jax.Array, axis: str, size: int) -> jax.Array:
    return lax.all_to_all(
        x, axis, split_axis=1, concat_axis=1, axis_index_groups=_pairs(size), tiled=True
    )


def _of_queries(of_keys: Int[Array, "b u"], where: Placement) -> Int[Array, "b t"]:
    """Returns the documents of queries, from those of all keys."""
    starts = jnp.asarray(where.starts, jnp.int32)[where.device]
    runs = [
        lax.dynamic_slice_in_dim(of_keys, starts[i], where.run, axis=1)
        for i in range(where.starts.shape[1])
    ]
    return jnp.concatenate(runs, axis=1)


def _with_tails(
    run: Callable[..., jax.Array],
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    segment_ids: Array | None,
    axis: str,
    size: int,
    tail: int,
) -> jax.Array:
    """Runs attention within a window: a device is sent the end of the slice before its own."""
    length, device = q.shape[1], lax.axis_index(axis)
    from_left = partial(_tail_of_left, axis=axis, size=size, tail=tail)
    k, v = (jnp.concatenate([from_left(x), x], axis=1) for x in (k, v))
    own = jnp.ones(q.shape[:2], jnp.int32) if segment_ids is None else segment_ids
    # Before the first slice there is nothing: what its device is sent is of no document.
    before = jnp.where(device == 0, jnp.iinfo(jnp.int32).min, from_left(own))
    segments: Segments = own, jnp.concatenate([before, own], axis=1)
    where = Placement(np.array([[tail]]), length, tail + length)
    return run(q, k, v, sinks, segments, where)


def _tail_of_left(x: jax.Array, axis: str, size: int, tail: int) -> jax.Array:
    """Returns the last `tail` tokens of the slice of the device before, [b, tail, ...]."""
    device, end = lax.axis_index(axis), x[:, x.shape[1] - tail :]
    gather: Any = partial(lax.all_gather, end, axis, axis=0)
    if size % 2:
        return gather()[device - 1]
    # In place of a permute, gathers of pairs of neighbours, of which the left one is even or odd.
    even, odd = (
        gather(axis_index_groups=[[d, (d + 1) % size] for d in range(first, size, 2)])[0]
        for first in (0, 1)
    )
    return jnp.where(device % 2 == 1, even, odd)
