"""One contract for the weights of a rank: `WeightGather`, in the three ways that a `Gather` names.

A rank runs several stages, its chunks (the repeats of a circular pipeline). `prefetch` gathers the
weights of a chunk before the rank begins it. The rank makes its `window` of them when it begins,
and holds it while it stays with the chunk. In a tick, `unshard` returns the weights in the window
for the stage, and `accumulate` adds their gradients in float32; `reduce_scatter` sums the gradients
of a chunk over devices when the rank leaves it. The engines decide when a rank changes chunks: the
circular engine once per repeat, the scheduled engine by the prefetch plan of its tables. Both
transfers can be spread over the ticks of a chunk, as the circular engine does: `prefetch_part` and
`reduce_scatter_part` move a part.

|        | prefetch | window               | unshard | accumulate      | reduce_scatter  |
|--------|----------|----------------------|---------|-----------------|-----------------|
| tick   |          | cast                 | gathers | reduce-scatters |                 |
| repeat | gathers  | result of `prefetch` |         |                 | reduce-scatters |
| once   |          | of a gathered copy   |         |                 | reduce-scatters |

In `tick` on a mesh that divides no weights or rows, sums are whole as in the other ways. In the
fourth way, per layer, the stage gathers by itself (`_per_layer`): to the engines its weights are
gathered once.

Where gathers are once, what completes a sum may scatter it in place, slice by slice: a stage that
adds its last gradients to sums that are whole can send a layer's sums while it computes the next
layer. Each device writes its shard over the first part of the sum, so that sums of all layers and
their shards are never there both.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from ... import _compat
from ...autodiff.backward import floating
from ...autodiff.staged_model import index_leading
from ...ir.transforms import Entry, Finish, add_gradients
from ...sharding.specs import axes_of, axes_of_dim
from .._buffers import add_trees, over_leading, put, to_accum_dtype
from ..ranks import zeros, zeros_like
from ._collectives import reduce_scatter_leaf
from ._gather import (
    Gather,
    TreeFunction,
    first_of_leaves,
    identity,
    map_leaves,
    only_after,
    without_done,
)
from ._parts import communicates, gather_part, reduce_scatter_part

ReadChunk = Callable[[PyTree, Any], PyTree]
"""From [chunks, ...] weights and the index of a chunk to the weights of that chunk."""


class WeightGather(NamedTuple):
    """Functions that gather the weights of one rank, by the table above, and initial gradients.

    Attributes:
        prefetch: Maps the index of a chunk to the weights gathered before the rank begins it.
        prefetch_part: Maps `(prefetched, chunk, part, num_parts, after, before)` to `prefetched`
            with one part of the chunk's weights gathered and written, and `before`, which is not
            used before the part has arrived. It is sent when `after` is computed. After all parts
            `prefetched` has what `prefetch` returns.
        window: Maps these and the index to the weights that the rank holds while it runs the chunk.
        unshard: Maps a window to the weights that a stage reads.
        accumulate: Maps `(sum, backward, *arguments)` to `(new sum, result)`, where the sum is of
            float32 gradients over ticks, and `backward(*arguments)` returns the gradients of the
            weights that a stage read, and a result.
        accumulate_in_place: Maps `(sums, chunk, add)` to `(new sums, result)`, where sums have
            [chunks, ...] float32 leaves, and `add` maps the unsharded sum of a chunk to this sum
            with gradients added, and a result. `add` may be given entries of the sums; it then
            returns their buffers.
        entries: Maps the index of a chunk to its weights as entries of the buffers that hold them,
            or as arrays if there is one chunk. None if weights are gathered when they are read.
        reduce_scatter: Maps a chunk's sum of gradients to gradients sharded as they are stored, of
            which those that are whole may still be sums of a device.
        reduce_scatter_part: Maps `(gradients, chunk, sum, part, num_parts, after, before)` to
            gradients as stored, [chunks, ...], with one part of the chunk's sum scattered into
            them; the sum, which may be overwritten then; and `before`.
        scatter_slices: For each weight what scatters its complete sum, or a slice of it, in place,
            or None; () if sums are scattered after the last tick alone.
        scattered: Maps a chunk's sum, of which that has been done, to what `reduce_scatter`
            returns.
        finish: Maps gradients of a chunk that `reduce_scatter` returned, after all ticks, to those
            that are summed over devices.
        zeros: Maps a window to the initial sum, zeros.
        zero_unsharded: Maps the weights that a stage read to zeros like their float32 gradients.
        zero_sums: Returns the initial sums of all chunks, [chunks, ...].
        zero_gradients: Maps a number of chunks to zero gradients as stored, with that dim in front.
    """

    prefetch: Callable[[Any], PyTree]
    prefetch_part: Callable[[PyTree, Any, Any, int, PyTree, PyTree], tuple[PyTree, PyTree]]
    window: Callable[[PyTree, Any], PyTree]
    unshard: TreeFunction
    accumulate: Callable[..., tuple[PyTree, PyTree]]
    accumulate_in_place: Callable[[PyTree, Any, Callable], tuple[PyTree, PyTree]]
    entries: Callable[[Any], PyTree] | None
    reduce_scatter: TreeFunction
    reduce_scatter_part: Callable[
        [PyTree, Any, PyTree, Any, int, PyTree, PyTree], tuple[PyTree, PyTree, PyTree]
    ]
    scatter_slices: Sequence[Finish | None]
    scattered: TreeFunction
    finish: TreeFunction
    zeros: TreeFunction
    zero_unsharded: TreeFunction
    zero_sums: Callable[[], PyTree]
    zero_gradients: Callable[[int], PyTree]


def weight_gather(
    gather: Gather, weights: PyTree, *, read: ReadChunk = index_leading
) -> WeightGather:
    """Returns the functions of `WeightGather` for the weights of one rank."""
    match gather.when:
        case "tick":
            return _every_tick(gather, weights, read)
        case "repeat":
            return _every_chunk(gather, weights, read)
        case "once":
            return _once(gather, weights)


def _every_tick(gather: Gather, weights: PyTree, read: ReadChunk) -> WeightGather:
    """Holds cast weights, sharded as they are stored, and gathers them when a stage reads them."""

    def window(prefetched: PyTree, chunk: Any) -> PyTree:
        del prefetched
        return gather.cast(read(weights, chunk))

    def zero_unsharded() -> PyTree:
        return _zero_unsharded(gather, gather.cast_and_unshard(read(weights, 0)))

    if not _is_divided(gather):  # sums are stored whole, so gradients are added in place
        return _with_zeros(
            gather,
            window=window,
            unshard=gather.unshard,
            zero_sums=lambda: _zeros_of_chunks(zero_unsharded(), weights),
        )

    def to_sum(dw: PyTree) -> PyTree:
        # The reduce-scatter parts product and addition: the product may as well write float32.
        return gather.scatter_products(to_accum_dtype(dw, apart=False))

    def accumulate_in_place(sums: PyTree, chunk: Any, add: Callable) -> tuple[PyTree, PyTree]:
        new, result = add(zero_unsharded())
        return put(sums, add_trees(index_leading(sums, chunk), to_sum(new)), chunk), result

    def zero_sums() -> PyTree:
        return _zeros_of_chunks(to_sum(zero_unsharded()), weights)

    return _with_zeros(
        gather,
        window=window,
        unshard=gather.unshard,
        to_sum=to_sum,
        accumulate_in_place=accumulate_in_place,
        zero_sums=zero_sums,
    )


def _is_divided(gather: Gather) -> bool:
    """Returns whether weights or gradients are divided over axes until a stage reads them."""
    if gather.divided_over is None:
        return communicates()
    sizes = jax.sharding.get_abstract_mesh().shape
    return any(sizes.get(axis, 1) > 1 for axis in gather.divided_over)


def _every_chunk(gather: Gather, weights: PyTree, read: ReadChunk) -> WeightGather:
    """Gathers the weights of a chunk ahead, and holds them while the rank runs it."""

    def prefetch(chunk: Any) -> PyTree:
        return gather.cast_and_unshard(read(weights, chunk))

    def window(prefetched: PyTree, chunk: Any) -> PyTree:
        del chunk
        return prefetched

    def zero_sums() -> PyTree:
        return _zeros_of_chunks(_zero_unsharded(gather, prefetch(0)), weights)

    return _with_zeros(
        gather,
        prefetch=prefetch,
        prefetch_part=partial(gather_part, gather, read, weights),
        window=window,
        zero_sums=zero_sums,
    )


def _once(gather: Gather, weights: PyTree) -> WeightGather:
    """Gathers the weights of all chunks before the first tick, and holds this copy."""
    copy = over_leading(gather.cast_and_unshard, weights)

    def window(prefetched: PyTree, chunk: Any) -> PyTree:
        del prefetched
        return index_leading(copy, chunk)

    def zero_sums() -> PyTree:
        zero_grads = zeros_like(to_accum_dtype(floating(copy)))
        return over_leading(gather.constrain_unsharded, zero_grads)

    return _with_zeros(
        gather,
        window=window,
        entries=partial(_entries, copy),
        scatter_slices=scatter_slices(gather, floating(weights)),
        zero_sums=zero_sums,
    )


def _entries(buffers: PyTree, index: Any) -> PyTree:
    """Returns entries of buffers, or arrays for a single chunk, which XLA:TPU fuses better."""
    if _num_chunks(buffers) > 1:
        return jax.tree.map(lambda buffer: Entry(buffer, index), buffers)
    return index_leading(buffers, index)


def _in_place(sums: PyTree, chunk: Any, add: Callable) -> tuple[PyTree, PyTree]:
    new, result = add(_entries(sums, chunk))
    return (new if _num_chunks(sums) > 1 else put(sums, new, chunk)), result


def _num_chunks(buffers: PyTree) -> int:
    return max((len(buffer) for buffer in jax.tree.leaves(buffers)), default=0)


def _nothing(chunk: Any) -> PyTree:
    del chunk
    return ()


def _no_part(
    prefetched: PyTree, chunk: Any, part: Any, num_parts: int, after: PyTree, before: PyTree
) -> tuple[PyTree, PyTree]:
    del chunk, part, num_parts, after
    return prefetched, before


def _with_zeros(
    gather: Gather,
    *,
    prefetch: Callable[[Any], PyTree] = _nothing,
    window: Callable[[PyTree, Any], PyTree],
    unshard: TreeFunction = identity,
    zero_sums: Callable[[], PyTree],
    to_sum: TreeFunction | None = None,
    accumulate_in_place: Callable[[PyTree, Any, Callable], tuple[PyTree, PyTree]] = _in_place,
    entries: Callable[[Any], PyTree] | None = None,
    prefetch_part: Callable[
        [PyTree, Any, Any, int, PyTree, PyTree], tuple[PyTree, PyTree]
    ] = _no_part,
    scatter_slices: Sequence[Finish | None] = (),
) -> WeightGather:
    """Returns the record of these functions; `to_sum` maps gradients to those that are stored.

    A sum is then of these. By default sums are whole: gradients are added in place, and
    reduce-scattered afterwards.
    """
    is_scattered = to_sum is not None
    to_sum = to_sum or (lambda dw: gather.constrain_unsharded(to_accum_dtype(dw)))

    def reduction(gather: Gather) -> TreeFunction:
        return identity if is_scattered else gather.scatter

    def accumulate(total: PyTree, backward: Callable, *arguments: PyTree) -> tuple[PyTree, PyTree]:
        if is_scattered:
            dw, result = backward(*arguments)
            return add_trees(total, to_sum(dw)), result
        total, result = add_gradients(total, backward, *arguments)
        return gather.constrain_unsharded(total), result

    # Only the types of what these two compute are used.
    def zero_sum(w: PyTree) -> PyTree:
        return zeros_like(to_sum(floating(unshard(w))))

    def zero_gradients(num_chunks: int) -> PyTree:
        scattered = reduction(gather)(zero_sum(window(prefetch(0), 0)))
        return jax.tree.map(lambda x: zeros(x, lead=(num_chunks,)), scattered)

    return WeightGather(
        prefetch=prefetch,
        prefetch_part=prefetch_part,
        window=window,
        unshard=unshard,
        accumulate=accumulate,
        accumulate_in_place=accumulate_in_place,
        entries=entries,
        reduce_scatter=reduction(gather),
        reduce_scatter_part=partial(reduce_scatter_part, gather, reduction),
        scatter_slices=scatter_slices,
        scattered=partial(scattered, gather) if any(scatter_slices) else reduction(gather),
        finish=gather.sum_whole,
        zeros=zero_sum,
        zero_unsharded=lambda w: _zero_unsharded(gather, w),
        zero_sums=zero_sums,
        zero_gradients=zero_gradients,
    )


def _zeros_of_chunks(gradient: PyTree, weights: PyTree) -> PyTree:
    """Returns zeros like the gradient of a stage, with the dim of chunks of `weights` in front."""
    counts = {leaf.shape[0] for leaf in jax.tree.leaves(weights)}
    return jax.tree.map(lambda x: zeros(x, lead=tuple(counts)), gradient)


def _zero_unsharded(gather: Gather, w: PyTree) -> PyTree:
    return gather.constrain_unsharded(zeros_like(to_accum_dtype(floating(w))))


def read_after(weights: PyTree, chunk: Any) -> PyTree:
    """Returns the weights of a chunk, which XLA cannot cast before it knows the chunk.

    Otherwise it casts those of all chunks before the loop, and holds the copy. A `ReadChunk`.
    """
    return jax.tree.map(partial(only_after, chunk), index_leading(weights, chunk))


def scatter_slices(gather: Gather, sums: PyTree) -> list[Finish | None]:
    """Returns for each leaf of `sums` what scatters it, complete, or a slice of it, in place.

    None is for sums that are not scattered so: those that are whole where they are stored, or that
    XLA's partitioner divides along the same dim.
    """
    # XLA:GPU copies for longer what it waits less (1F1B of llama2-7b on h100:8, jax 0.10.2: 14 and
    # 12 ms), in 1.3 GB more.
    if not gather.batch_axes or gather.by_specs is None or _compat.platform() == "gpu":
        return []
    return [way.finish if way.sends else None for way in jax.tree.leaves(_ways(gather, sums))]


def scattered(gather: Gather, sums: PyTree) -> PyTree:
    """Returns the shards of sums whose slices have been scattered, and scatters the others.

    Those that are stored whole are left sums of a device, as by `Gather.scatter`.
    """
    ways = _ways(gather, sums)
    shards = map_leaves(
        lambda x, way: way.shard(x, gather.batch_axes) if way.sends else None, sums, ways
    )
    others = map_leaves(lambda x, way: None if way.sends else x, sums, ways)
    return first_of_leaves(shards, gather.scatter(others))


@dataclass(frozen=True)
class _Way:
    """How a sum is scattered: by the spec `left`.

    Axes divide it by `done` already, and those that are not manual by `whole`.
    """

    left: PartitionSpec
    done: PartitionSpec
    whole: PartitionSpec
    dtype: Any

    @property
    def sends(self) -> bool:
        sizes = jax.sharding.get_abstract_mesh().shape
        is_divided = any(sizes[axis] > 1 for axis in axes_of(self.left))
        dims = zip(self.left, self.whole, strict=False)
        return is_divided and not any(axes_of_dim(a) and axes_of_dim(b) for a, b in dims)

    @property
    def finish(self) -> Finish:
        of_slice = None if axes_of_dim(self.left[0]) else partial(self._scatter, 1)
        return Finish(partial(self._scatter, 0), of_slice)

    def _scatter(self, num_dims: int, x: jax.Array) -> jax.Array:
        """Returns a sum, without `num_dims` dims, with this device's shard in its first part."""
        left, whole = (PartitionSpec(*spec[num_dims:]) for spec in (self.left, self.whole))
        # Over axes that do not divide it, it is summed later: written into `x`, which varies over
        # them, it would not be known to be equal on their devices.
        shard = reduce_scatter_leaf((), x, left, whole, as_rows=True, dtype=self.dtype)
        return lax.dynamic_update_slice(x, shard, [jnp.int32(0)] * x.ndim)

    def shard(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """Returns the shard in the first part of a sum, summed over the `axes` that are left."""
        sizes = jax.sharding.get_abstract_mesh().shape
        for dim, names in enumerate(self.left):
            shards = math.prod(sizes[axis] for axis in axes_of_dim(names))
            x = lax.slice_in_dim(x, 0, x.shape[dim] // shards, axis=dim)
        divided = {*axes_of(self.left), *axes_of(self.done)}
        rest = tuple(axis for axis in axes if axis not in divided)
        whole = PartitionSpec(*[None] * len(self.left))
        return reduce_scatter_leaf(rest, x, whole, self.whole, dtype=self.dtype)


def _ways(gather: Gather, sums: PyTree) -> PyTree:
    """Returns the `_Way` of each sum."""
    assert gather.by_specs is not None

    def way(_: jax.Array, spec: PartitionSpec, done: PartitionSpec, whole: PartitionSpec) -> _Way:
        return _Way(without_done(spec, done), done, whole, gather.reduce_dtype)

    return map_leaves(way, sums, gather.gradient_specs, gather.sum_specs, gather.by_specs.specs[1])
