"""State that slices of a sequence carry, in the buffers of the scheduled engine.

A rank has one entry for each microbatch that is alive, to which all its slices write, and one for
its cotangent. The state that the forward of a slice has read is that entry with zeros from the
slice's own positions on, so a backward needs no copy of it. Without slices all trees are empty.

S ranks, T positions in slices of t. A piece is one slice of one microbatch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from ...autodiff import Remat, StagedModel, keep
from ...autodiff.staged_model import WHOLE_STATE, Aux, Past, index_leading
from .._buffers import put
from ..ranks import pvary
from ._rows import Index, PhaseRow


class SliceInputs(NamedTuple):
    """What a stage is given besides weights, activations and keys.

    Attributes:
        earlier: Leaves of the state of earlier slices; [] without slices.
        offset: The position of the slice's first token; () without slices.
    """

    batch: PyTree
    earlier: list[Any]
    offset: Any = ()


class StageOutputs(NamedTuple):
    """What a stage returns that has a cotangent; `new` is what this slice writes to the state."""

    activation: PyTree
    new: list[Any]


class PastLayout(NamedTuple):
    """The form of the state of one stage and microbatch, in slices of `length` positions.

    Attributes:
        dims: The dim of positions of every leaf.
    """

    num_slices: int = 1
    structure: Any = None
    shapes: tuple[Any, ...] = ()
    dims: tuple[int, ...] = ()
    length: int = 0

    @property
    def is_floating(self) -> list[bool]:
        """Returns whether each leaf has a derivative."""
        return [jnp.issubdtype(shape.dtype, jnp.inexact) for shape in self.shapes]


def past_layout(model: StagedModel, num_slices: int, *examples: PyTree) -> PastLayout:
    """Returns the state that slices carry, by tracing the stage with `examples`."""
    if num_slices == 1:
        return PastLayout()
    past, dims, length = model.past_of_slices(num_slices, *examples)
    whole, structure = jax.tree.flatten(past.earlier)
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in whole)
    return PastLayout(num_slices, structure, shapes, dims, length)


def stage_of_pieces(
    model: StagedModel, layout: PastLayout
) -> Callable[[Any, Any, SliceInputs, Any], tuple[StageOutputs, Aux]]:
    """Returns `(weights, x, SliceInputs, keys) -> (StageOutputs, aux)`, the stage of one slice."""

    def run_whole(weights: Any, x: Any, inputs: SliceInputs, keys: Any) -> tuple[StageOutputs, Aux]:
        y, aux = model.stage(weights, x, inputs.batch, keys)
        return StageOutputs(y, []), aux

    def run_slice(weights: Any, x: Any, inputs: SliceInputs, keys: Any) -> tuple[StageOutputs, Aux]:
        assert model.sliced_stage is not None, "checked at the entry"
        past = Past(
            layout.structure.unflatten(inputs.earlier),
            offset=inputs.offset,
            num_slices=layout.num_slices,
        )
        y, aux, past = model.sliced_stage(weights, x, inputs.batch, keys, past)
        return StageOutputs(y, jax.tree.leaves(past.new)), aux

    return run_whole if layout.num_slices == 1 else run_slice


def remat_of_pieces(remat: Remat, layout: PastLayout) -> Remat:
    """Returns a wrapper of stages that never stores the whole state for each slice.

    A policy that stores everything would store keys and values of all slices with every slice.
    """
    if remat is not keep or layout.num_slices == 1:
        return remat
    policy = jax.checkpoint_policies.save_anything_except_these_names(WHOLE_STATE)
    return partial(jax.checkpoint, prevent_cse=False, policy=policy)


def slice_inputs(
    layout: PastLayout, batch: PyTree, buffers: list[jax.Array], work: PhaseRow
) -> SliceInputs:
    """Returns the inputs of the stage for the slice of `work`; `buffers` are leaves of states."""
    if layout.num_slices == 1:
        return SliceInputs(batch, [])
    offset = _offset(layout, work)

    def read(buffer: jax.Array, dim: int) -> jax.Array:
        state = index_leading(buffer, work.past_slot)
        is_earlier = lax.broadcasted_iota(jnp.int32, state.shape, dim) < offset
        return jnp.where(is_earlier, state, jnp.zeros_like(state))

    return SliceInputs(batch, list(map(read, buffers, layout.dims)), pvary(offset))


def write_past(
    layout: PastLayout, buffers: list[jax.Array], new: list[jax.Array], work: PhaseRow
) -> list[jax.Array]:
    """Writes what a slice has appended to the state of its microbatch, if `work` has a piece."""

    def write(buffer: jax.Array, part: jax.Array, dim: int) -> jax.Array:
        starts = _starts(layout, buffer, dim, work, work.past_slot)
        old = lax.dynamic_slice(buffer, starts, (1, *part.shape))
        return lax.dynamic_update_slice(
            buffer, jnp.where(work.past_slot >= 0, part[None], old), starts
        )

    return list(map(write, buffers, new, layout.dims))


def cotangent_of_new(
    layout: PastLayout, buffers: list[jax.Array], work: PhaseRow
) -> list[jax.Array | None]:
    """Returns the cotangent of what a slice has appended: the sum over all later slices.

    It has an entry for each leaf of the state, None for those without a derivative.
    """
    remaining = iter(buffers)

    def read(dim: int, is_floating: bool, shape: jax.ShapeDtypeStruct) -> jax.Array | None:
        if not is_floating:
            return None
        buffer = next(remaining)
        sizes = [1, *buffer.shape[1:]]
        sizes[dim + 1] = layout.length
        starts = _starts(layout, buffer, dim, work, work.past_cotangent_slot)
        part = lax.dynamic_slice(buffer, starts, sizes)[0].astype(shape.dtype)
        return jnp.where(_is_last(layout, work), jnp.zeros_like(part), part)

    return list(map(read, layout.dims, layout.is_floating, layout.shapes))


def add_past_cotangents(
    layout: PastLayout, buffers: list[jax.Array], new: list[jax.Array], work: PhaseRow
) -> list[jax.Array]:
    """Adds the cotangent of the state that a slice has read; the last slice's is the first."""

    def add(buffer: jax.Array, cotangent: jax.Array) -> jax.Array:
        old = index_leading(buffer, work.past_cotangent_slot)
        total = jnp.where(_is_last(layout, work), cotangent, old + cotangent)
        kept = jnp.where(work.past_cotangent_slot >= 0, total, old)
        return put(buffer, kept, work.past_cotangent_slot)

    return list(map(add, buffers, new))


def _offset(layout: PastLayout, work: PhaseRow) -> Index:
    return jnp.asarray(work.microbatch % layout.num_slices * layout.length, jnp.int32)


def _is_last(layout: PastLayout, work: PhaseRow) -> jax.Array:
    return work.microbatch % layout.num_slices == layout.num_slices - 1


def _starts(
    layout: PastLayout, buffer: jax.Array, dim: int, work: PhaseRow, slot: Index
) -> list[Any]:
    """Returns where the positions of the slice begin in a slot of a buffer."""
    # With `jax_enable_x64` a zero would be wider than the others.
    starts: list[Any] = [jnp.asarray(slot, jnp.int32), *[jnp.int32(0)] * (buffer.ndim - 1)]
    starts[dim + 1] = _offset(layout, work)
    return starts
