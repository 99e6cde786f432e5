"""Residuals that the forward stores for the backward: buffers with one entry per tick.

With many repeats the earlier and the later half of the repeats have loops and buffers of their own:
the backward frees the buffers of the later half before it has filled the gradients of the earlier
half, so the peaks of residuals and gradients do not coincide.
"""

from typing import Any

import jax

from ...ir.graph import pvary_like
from ...schedules.lock_step import middle_chunk
from .._buffers import allocate_buffer, put
from ._loop_phases import phase_of
from ._shape import PipelineShape, TickIndex

Buffers = list[jax.Array]
"""[ticks, ...] residuals of the ticks of some repeats; empty if none are stored."""


def halves_of_repeats(shape: PipelineShape) -> list[range]:
    """Returns the repeats that have buffers of their own, in the order of the forward."""
    middle, end = middle_chunk(shape.num_repeats), shape.num_repeats
    return [repeats for repeats in (range(middle), range(middle, end)) if repeats]


def num_entries(shape: PipelineShape) -> list[int]:
    """Returns the entries of the buffers of each half."""
    return [phase_of(shape, repeats).length for repeats in halves_of_repeats(shape)]


def allocate(avals: list[Any], shape: PipelineShape, repeats: range) -> Buffers:
    """Allocates a buffer for each abstract value of a residual, in its memory space."""
    return [allocate_buffer(x, phase_of(shape, repeats).length) for x in avals]


def entry_of(t: TickIndex, shape: PipelineShape, repeats: range) -> TickIndex:
    """Returns the entry of tick `t` in the buffers of `repeats`."""
    return t - phase_of(shape, repeats).start


def store(buffers: Buffers, new: list[jax.Array], entry: TickIndex) -> Buffers:
    """Writes the residuals of a tick to their entry; without buffers nothing is written."""
    pairs = zip(buffers, new, strict=bool(buffers))
    return put(buffers, [pvary_like(jax.typeof(buffer), x) for buffer, x in pairs], entry)
