"""The ticks of a circular pipeline, cut into blocks: one for each repeat.

Rank 0 begins repeat j at tick j * M, with the block, and rank r at tick j * M + r * d, inside it:
until then it works on repeat j - 1. So a rank needs the weights of two repeats in a block, and
those of a third can be on their way. Microbatches enter in the first block and leave in the last,
which has the bubbles behind it too. There they leave only after d * (S - 1) ticks; what the last
rank puts into the stream before that falls out again on rank 0.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from ._shape import Counts, ticks_of


class Segment(NamedTuple):
    """`length` ticks from `first` on, in all of which the stream moves, or does not."""

    first: Any
    length: int
    enters: bool = False
    leaves: bool = False

    @property
    def ticks(self) -> Int[Array, " length"]:
        return self.first + jnp.arange(self.length)


def enter(counts: Counts) -> Segment:
    """The block of repeat 0."""
    return Segment(0, counts.num_microbatches, enters=True)


def middle(counts: Counts, repeat: Any) -> Segment:
    """The block of a repeat that is neither the first nor the last."""
    M = counts.num_microbatches
    return Segment(repeat * M, M)


def last(counts: Counts) -> Segment:
    """The block of the last repeat, if it is not the first."""
    first = (counts.num_repeats - 1) * counts.num_microbatches
    return Segment(first, ticks_of(counts) - first, leaves=True)


def only_repeat(counts: Counts) -> Iterator[Segment]:
    """All ticks if there is one repeat: microbatches may enter and leave in the same tick."""
    end, M = ticks_of(counts), counts.num_microbatches
    cuts = sorted({0, M, end - M, end})
    for first, after in pairwise(cuts):
        yield Segment(first, after - first, enters=first < M, leaves=first >= end - M)
