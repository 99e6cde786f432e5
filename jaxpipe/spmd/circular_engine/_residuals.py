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
from .._ranks import AXIS
from .._varying import pvary, zeros
from ._shape import Counts, put, ticks_of

Buffers = list[jax.Array]


class Kept(NamedTuple):
    """Residuals, [ticks, ...] each.

    With two halves each buffer has one more entry, which is written in the ticks of the other half
    and never read.

    Attributes:
        early: Residuals of the ticks before the first late repeat; empty if that is repeat 0.
        late: Residuals of the other ticks.
    """

    early: Buffers
    late: Buffers


def first_late_repeat(counts: Counts) -> int:
    """Returns the first repeat whose residuals are in the buffers `late`.

    It is 0, so that there are no early buffers, below 8 repeats: a second set of buffers is then
    not worth its compile time.
    """
    return counts.num_repeats // 2 if counts.num_repeats >= 8 else 0


def room(residuals: list[Any], counts: Counts) -> Kept:
    """Allocates buffers for residuals of these abstract values, in the memory space of each.

    Raises:
        ValueError: If residuals are offloaded to host memory, but one device runs all ranks.
    """
    cut = _first_late_tick(counts)
    early, late = (
        [buffer(x, ticks + bool(cut)) for x in residuals] for ticks in (cut, ticks_of(counts) - cut)
    )
    return Kept(early if cut else [], late)


def buffer(x: Any, length: int) -> jax.Array:
    """Allocates a zero buffer of `length` entries like the abstract value `x`.

    Returns:
        [length, ...], in the memory space of `x`.

    Raises:
        ValueError: If that is host memory, but one device runs all ranks.
    """
    nothing = zeros(x, lead=(length,))
    if x.memory_space != jax.memory.Space.Host:
        return nothing
    if AXIS not in jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            "`remat` offloads, but without a `mesh` one device plays all ranks, and JAX cannot "
            "index into the host's memory for several of them. Give a mesh, or a policy that "
            "keeps tensors on the device."
        )
    return jax.device_put(nothing, jax.memory.Space.Host)


def store(kept: Kept, residuals: Buffers, t: Int[Array, ""], counts: Counts) -> Kept:
    """Writes the residuals of tick `t` to their entry."""
    cut = _first_late_tick(counts)
    residuals = [pvary(x) for x in residuals]
    late = put(kept.late, residuals, jnp.where(t < cut, ticks_of(counts) - cut, t - cut))
    early = put(kept.early, residuals, jnp.minimum(t, cut)) if cut else []
    return Kept(early, late)


def read_early(kept: Kept, counts: Counts, t: Int[Array, ""]) -> Buffers:
    del counts
    return index_leading(kept.early, t)


def read_late(kept: Kept, counts: Counts, t: Int[Array, ""]) -> Buffers:
    return index_leading(kept.late, t - _first_late_tick(counts))


def _first_late_tick(counts: Counts) -> int:
    return first_late_repeat(counts) * counts.num_microbatches
