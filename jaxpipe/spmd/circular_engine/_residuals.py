"""Residuals that the forward stores for the backward: buffers with one entry per tick.

With many repeats the residuals of the earlier and the later half of the repeats are in separate
buffers: the backward frees the buffers of the later half before it has filled the gradients of the
earlier half, so the peaks of residuals and gradients do not coincide.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ...autodiff._model import index_leading
from .._buffers import allocate_buffer, put
from .._varying import pvary
from ._shape import PipelineShape

Buffers = list[jax.Array]


class Residuals(NamedTuple):
    """Residuals, [ticks, ...] each.

    With two halves each buffer has one more entry, which is written in the ticks of the other half
    and never read.

    Attributes:
        early: Residuals of the ticks before the first late repeat; empty if that is repeat 0.
        late: Residuals of the other ticks.
    """

    early: Buffers
    late: Buffers


def first_late_repeat(shape: PipelineShape) -> int:
    """Returns the first repeat whose residuals are in the buffers `late`.

    It is 0, so that there are no early buffers, below 8 repeats: a second set of buffers is then
    not worth its compile time.
    """
    return shape.num_repeats // 2 if shape.num_repeats >= 8 else 0


def allocate(avals: list[Any], shape: PipelineShape) -> Residuals:
    """Allocates a buffer for each abstract value of a residual, in its memory space.

    Args:
        avals: The abstract values of the residuals of one tick.
        shape: The shape of the pipeline.

    Returns:
        The buffers, with a slot for each tick whose residuals are saved.

    Raises:
        ValueError: If residuals are offloaded to host memory, but one device runs all ranks.
    """
    cut = _first_late_tick(shape)
    early, late = (
        [allocate_buffer(x, ticks + bool(cut)) for x in avals]
        for ticks in (cut, shape.num_ticks - cut)
    )
    return Residuals(early if cut else [], late)


def store(residuals: Residuals, new: Buffers, t: Int[Array, ""], shape: PipelineShape) -> Residuals:
    """Writes the residuals of tick `t` to their entry."""
    cut = _first_late_tick(shape)
    new = [pvary(x) for x in new]
    late = put(residuals.late, new, jnp.where(t < cut, shape.num_ticks - cut, t - cut))
    early = put(residuals.early, new, jnp.minimum(t, cut)) if cut else []
    return Residuals(early, late)


def read_early(residuals: Residuals, shape: PipelineShape, t: Int[Array, ""]) -> Buffers:
    del shape
    return index_leading(residuals.early, t)


def read_late(residuals: Residuals, shape: PipelineShape, t: Int[Array, ""]) -> Buffers:
    return index_leading(residuals.late, t - _first_late_tick(shape))


def _first_late_tick(shape: PipelineShape) -> int:
    return first_late_repeat(shape) * shape.num_microbatches
