"""Weights that are gathered, and gradients that are reduce-scattered, part by part.

A pipeline that gathers the weights of a chunk while it computes with those of another moves one of
`num_parts` parts in every tick, beside the work of that tick. A dim of n entries, stored in D
shards, is seen as [D, n / D]; a part is a slice of n / D. So a part is sharded and gathered as the
whole is, by a `Gather` of specs with one dim more.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import PyTree

from ...sharding import varying_axes
from ...sharding.specs import axes_of_dim
from .._buffers import put
from ..ranks import AXIS, execution_count_hint, update_if
from ._gather import (
    REPLICATED,
    Gather,
    TreeFunction,
    first_of_leaves,
    identity,
    map_leaves,
)

_LANES = 128
"""Numbers in a row of a TPU's vector register: slices of a last dim begin at multiples."""


@dataclass(frozen=True)
class _Parts:
    """How an array is cut: dim `dim` is shards of `length` entries, of which a part has `size`.

    The last part overlaps with the one before if the length is no multiple: writing both is exact.
    """

    dim: int
    length: int
    size: int

    def begin(self, part: Any) -> Any:
        """Returns the first entry of a part in every shard."""
        return jnp.minimum(part * self.size, self.length - self.size)

    def split(self, x: jax.Array, lead: int = 0) -> jax.Array:
        """Returns `x`, which has `lead` dims in front, with the dim as [shards, length]."""
        dim = self.dim + lead
        return x.reshape(*x.shape[:dim], -1, self.length, *x.shape[dim + 1 :])

    def split_spec(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns the spec of what `split` returns. Dims beyond the end of a spec stay beyond."""
        if len(spec) <= self.dim:
            return spec
        return PartitionSpec(*spec[: self.dim + 1], None, *spec[self.dim + 1 :])

    def read(self, x: jax.Array, part: Any, lead: int = 0) -> jax.Array:
        """Returns a part of `x`, with shards and entries as dims of their own."""
        dim = self.dim + lead + 1
        return lax.dynamic_slice_in_dim(self.split(x, lead), self.begin(part), self.size, dim)

    def write(self, buffer: jax.Array, new: jax.Array, part: Any, *lead: Any) -> jax.Array:
        """Returns `buffer` with a part of its entry at `lead`, indices of the dims in front."""
        split = self.split(buffer, len(lead))
        begin = [*lead, *[0] * (split.ndim - len(lead))]
        begin[len(lead) + self.dim + 1] = self.begin(part)
        new = new.reshape((1,) * len(lead) + new.shape)
        begin = [jnp.int32(index) for index in begin]
        return lax.dynamic_update_slice(split, new, begin).reshape(buffer.shape)


def gather_part(
    gather: Gather,
    read: Callable[[PyTree, Any], PyTree],
    weights: PyTree,
    buffer: PyTree,
    chunk: Any,
    part: Any,
    num_parts: int,
    after: PyTree,
    before: PyTree,
) -> tuple[PyTree, PyTree]:
    """Returns `buffer`, weights of a chunk that are gathered, with one part gathered and written.

    `weights` [chunks, ...] are stored, and `read` returns those of one chunk. The part is sent when
    `after` is computed. `before` is returned too: it is not used before the part has arrived.
    """
    specs = _specs_of(gather, buffer)[0]
    parts = map_leaves(lambda w, spec: _parts_of(w.shape[1:], spec, num_parts), weights, specs)
    cut = map_leaves(lambda w, cutting: cutting.read(w, part, lead=1), weights, parts)
    stored = map_leaves(lambda w: read(w, _known_after(after, chunk, w)), cut)
    new = _of_parts(gather, parts).cast_and_unshard(stored)
    written = map_leaves(lambda b, x, cutting: cutting.write(b, x, part), buffer, new, parts)
    # XLA's schedulers put transfers whose results only the next tick reads behind all other work of
    # a tick, where there is nothing to hide them.
    return written, _only_after(new, before)


def reduce_scatter_part(
    gather: Gather,
    reduce_scatter: Callable[[Gather], TreeFunction],
    gradients: PyTree,
    chunk: Any,
    total: PyTree,
    part: Any,
    num_parts: int,
    after: PyTree,
    before: PyTree,
) -> tuple[PyTree, PyTree, PyTree]:
    """Returns `gradients` [chunks, ...] as stored, with a part of a chunk's sum scattered into it.

    `total` is the sum, and `reduce_scatter` returns the function of a `Gather` that scatters it.
    Arrays that this does not move are written whole, with the first part. `after` and `before` are
    those of `gather_part`.
    """
    specs = _specs_of(gather, total)[2]
    parts = map_leaves(lambda g, spec: _parts_of(g.shape[1:], spec, num_parts), gradients, specs)

    def read(x: jax.Array, cutting: _Parts) -> jax.Array:
        return cutting.read(x, _known_after(after, part, x))

    cut = map_leaves(read, total, parts)
    # A sum can be overwritten only after its part is read: otherwise XLA:TPU copies it.
    total = map_leaves(lambda x, read: _only_after(read, x), total, cut)
    new = reduce_scatter(_of_parts(gather, parts))(cut)
    moves = map_leaves(lambda x, y: communicates() and x is not y, cut, new)

    def write(buffer: jax.Array, x: jax.Array, cutting: _Parts, is_moved: bool) -> jax.Array | None:
        return cutting.write(buffer, x, part, chunk) if is_moved else None

    def only(tree: PyTree, *, moved: bool) -> PyTree:
        return map_leaves(lambda x, is_moved: x if is_moved == moved else None, tree, moves)

    def put_whole(gradients: PyTree) -> PyTree:
        return put(gradients, only(reduce_scatter(gather)(total), moved=False), chunk)

    hint = execution_count_hint([[index] for index in range(num_parts)], lambda index: index == 0)
    whole = update_if(part == 0, put_whole, only(gradients, moved=False), hint=hint)
    written = map_leaves(write, gradients, new, parts, moves)
    return first_of_leaves(written, whole), total, _only_after(only(new, moved=True), before)


def communicates() -> bool:
    """Returns whether there are devices over which weights or rows may be divided, beside ranks."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return any(size > 1 for axis, size in sizes.items() if axis not in (AXIS, "tensor"))


def _only_after(dependency: PyTree, tree: PyTree) -> PyTree:
    """Returns `tree`, which XLA can neither use nor overwrite before `dependency` is computed."""
    return lax.optimization_barrier((dependency, tree))[1]


def _known_after(dependency: PyTree, index: Any, x: jax.Array) -> Any:
    """Returns an index into `x` that XLA does not know before `dependency` is computed.

    If `dependency` varies over axes over which `x` does not, it is `index` as it is: a slice would
    vary over them, too.
    """
    if not jax.tree.leaves(dependency) or not varying_axes(dependency) <= varying_axes(x):
        return index
    return _only_after(dependency, jnp.int32(index))


def _specs_of(gather: Gather, tree: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """Returns the specs of stored weights, gathered weights and stored gradients, over all axes."""
    if gather.by_specs is not None:
        return gather.by_specs.specs
    return (jax.tree.map(lambda _: REPLICATED, tree),) * 3


def _of_parts(gather: Gather, parts: PyTree) -> Gather:
    """Returns the `Gather` of parts of weights."""
    if gather.by_specs is None:
        if gather.unshard is not identity or gather.reduce_scatter is not identity:
            raise ValueError(
                "The functions of `gather` were written by hand, so parts of weights cannot be "
                "gathered by them. Make it by `gather_weights`."
            )
        return gather

    def split(spec: PartitionSpec, cutting: _Parts | None) -> PartitionSpec:
        return spec if cutting is None else cutting.split_spec(spec)

    make, specs = gather.by_specs
    return make(*(jax.tree.map(split, tree, parts) for tree in specs))


def _parts_of(shape: tuple[int, ...], spec: PartitionSpec, num_parts: int) -> _Parts:
    """Returns the cut of a stored array into parts: along the dim that suits best."""
    choices = [
        _cut(dim, size // _shards(spec, dim), num_parts, is_last=dim == len(shape) - 1)
        for dim, size in enumerate(shape or (1,))
    ]

    def rank(cutting: _Parts) -> tuple:
        moved_twice = num_parts * cutting.size / max(cutting.length, 1)
        return moved_twice, _shards(spec, cutting.dim) > 1, cutting.dim == len(shape) - 1

    return min(choices, key=rank)


def _cut(dim: int, length: int, num_parts: int, *, is_last: bool) -> _Parts:
    size = math.ceil(length / num_parts)
    if is_last and length % _LANES == 0:
        size = math.ceil(size / _LANES) * _LANES
    return _Parts(dim, length, size)


def _shards(spec: PartitionSpec, dim: int) -> int:
    """Returns over how many devices of axes that are not manual a dim is sharded."""
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    axes = axes_of_dim(spec[dim]) if dim < len(spec) else ()
    return math.prod(
        mesh.shape[axis] for axis in axes if types.get(axis, AxisType.Manual) != AxisType.Manual
    )
