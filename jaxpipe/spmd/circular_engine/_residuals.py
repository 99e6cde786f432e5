"""Residuals that the forward stores for the backward: buffers with one entry per tick.

With many repeats the residuals of the earlier and the later half of the repeats are in separate
buffers: the backward frees the buffers of the later half before it has filled the gradients of the
earlier half, so the peaks of residuals and gradients do not coincide.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...autodiff.staged_model import index_leading
from ...ir.graph import pvary_like
from ...schedules.lock_step import middle_chunk
from .._buffers import allocate_buffer, put
from ._shape import PipelineShape, TickIndex

Buffers = list[jax.Array]


class Residuals(NamedTuple):
    """Residuals, [ticks, ...] each.

    With two halves each buffer has one more entry, which is written in the ticks of the other half
    and never read.

    Attributes:
        first_half: Residuals of the ticks before the first repeat of the second half; empty if that
            is repeat 0.
        second_half: Residuals of the other ticks.
    """

    first_half: Buffers
    second_half: Buffers


def middle_repeat(shape: PipelineShape) -> int:
    """Returns the first repeat whose residuals are in the buffers `second_half`."""
    return middle_chunk(shape.num_repeats)


def num_entries(shape: PipelineShape) -> tuple[int, int]:
    """Returns the entries of the buffers of the first and the second half; one more of two each."""
    cut = _first_tick_of_second_half(shape)
    return (cut + 1, shape.num_ticks - cut + 1) if cut else (0, shape.num_ticks)


def allocate(avals: list[Any], shape: PipelineShape) -> Residuals:
    """Allocates a buffer for each abstract value of a residual, in its memory space."""
    first_half, second_half = (
        [allocate_buffer(x, entries) for x in avals if entries] for entries in num_entries(shape)
    )
    return Residuals(first_half, second_half)


def store(residuals: Residuals, new: Buffers, t: TickIndex, shape: PipelineShape) -> Residuals:
    """Writes the residuals of tick `t` to their entry; without buffers nothing is written."""
    if not residuals.second_half:
        return residuals
    cut = _first_tick_of_second_half(shape)
    buffers = zip(residuals.second_half, new, strict=True)
    new = [pvary_like(jax.typeof(buffer), x) for buffer, x in buffers]
    second_half = put(
        residuals.second_half, new, jnp.where(t < cut, shape.num_ticks - cut, t - cut)
    )
    first_half = put(residuals.first_half, new, jnp.minimum(t, cut)) if cut else []
    return Residuals(first_half, second_half)


def read_first_half(residuals: Residuals, shape: PipelineShape, t: TickIndex) -> Buffers:
    del shape
    return index_leading(residuals.first_half, t)


def read_second_half(residuals: Residuals, shape: PipelineShape, t: TickIndex) -> Buffers:
    return index_leading(residuals.second_half, t - _first_tick_of_second_half(shape))


def _first_tick_of_second_half(shape: PipelineShape) -> int:
    return middle_repeat(shape) * shape.num_microbatches
