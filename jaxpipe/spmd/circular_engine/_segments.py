"""The ticks of a circular pipeline, cut into blocks: one for each repeat.

Rank 0 begins repeat j at tick j * M, the first of block j, and rank r at tick j * M + r * d, inside
the block: until then it works on repeat j - 1. So a rank needs the weights of two repeats in a
block, and those of a third can be gathered meanwhile. Microbatches enter in the first block and
leave in the last, which also includes the ticks in which the pipeline drains. In the last block
they leave only after d * (S - 1) ticks; results that the last rank writes to the stream before that
move down to rank 0 and are dropped.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from ._shape import Counts, ticks_of


class Segment(NamedTuple):
    """A range of `length` ticks from `first` on, in which the stream moves at all or at none."""

    first: Any
    length: int
    enters: bool = False
    leaves: bool = False

    @property
    def ticks(self) -> Int[Array, " length"]:
        return self.first + jnp.arange(self.length)


def enter(counts: Counts) -> Segment:
    """Returns the block of repeat 0, in which microbatches enter."""
    return Segment(0, counts.num_microbatches, enters=True)


def middle(counts: Counts, repeat: Any) -> Segment:
    """Returns the block of a repeat that is neither the first nor the last."""
    M = counts.num_microbatches
    return Segment(repeat * M, M)


def last(counts: Counts) -> Segment:
    """Returns the block of the last repeat, for pipelines with two repeats or more."""
    first = (counts.num_repeats - 1) * counts.num_microbatches
    return Segment(first, ticks_of(counts) - first, leaves=True)


def only_repeat(counts: Counts) -> Iterator[Segment]:
    """Yields the segments of a pipeline with one repeat.

    In such a pipeline microbatches may enter and leave in the same tick.
    """
    end, M = ticks_of(counts), counts.num_microbatches
    cuts = sorted({0, M, end - M, end})
    for first, after in pairwise(cuts):
        yield Segment(first, after - first, enters=first < M, leaves=first >= end - M)
