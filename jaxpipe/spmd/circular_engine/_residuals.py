"""What the ticks of a forward keep for the backward, one entry of a buffer per tick.

With many repeats there are two buffers, for the earlier and the later half of them: the backward
has done with the later half before it fills the second half of the gradients, so that their peaks
do not meet.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ...autodiff import index_leading
from .._ranks import AXIS, vary, zeros
from ._shape import Counts, put, ticks_of

Buffers = list[jax.Array]


class Kept(NamedTuple):
    """Residuals, [ticks, ...] each; with two halves each has one entry more, for the other's ticks.

    Attributes:
        early: Of the ticks before the first late repeat; no buffers if that is repeat 0.
        late: Of the others.
    """

    early: Buffers
    late: Buffers


def first_late_repeat(counts: Counts) -> int:
    """0 if there are too few repeats for the second buffer to be worth its compile time."""
    return counts.num_repeats // 2 if counts.num_repeats >= 8 else 0


def room(residuals: list[Any], counts: Counts) -> Kept:
    """Buffers for residuals of these abstract values, in the memory where they lie.

    Raises:
        ValueError: If residuals are to lie in the host's memory, but ranks are not devices.
    """
    cut = _first_late_tick(counts)
    early, late = (
        [buffer(x, ticks + bool(cut)) for x in residuals] for ticks in (cut, ticks_of(counts) - cut)
    )
    return Kept(early if cut else [], late)


def buffer(x: Any, length: int) -> jax.Array:
    """Room for so many of an abstract value, in the memory where it lies."""
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
    """Keeps the residuals of tick `t`."""
    cut = _first_late_tick(counts)
    residuals = [vary(x) for x in residuals]
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
