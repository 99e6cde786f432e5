"""The ticks of a circular pipeline, cut into segments with one set of weights, or two, each.

Rank r begins repeat j at tick j * M + r * d, so for the first d * (S - 1) ticks of a repeat the
ranks work on two different ones. Those ticks are `mixed`: some ranks need the weights of repeat
j - 1, some those of j. In the `settled` rest all work on repeat j, and the weights of repeat j + 1
can be on their way: two sets of weights are enough at any time. In order:

    enter                      repeat 0, and the bubbles before it
    mixed(j), settled(j)       for j = 1 ... R - 2
    mixed(R - 1), last         repeat R - 1, and the bubbles after it
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from ._circular import Counts, ticks_of


class Segment(NamedTuple):
    """`length` ticks from `first` on, in all of which microbatches enter and leave, or do not."""

    first: Any
    length: int
    enters: bool = False
    leaves: bool = False

    @property
    def ticks(self) -> Int[Array, " length"]:
        return self.first + jnp.arange(self.length)


def mixed(counts: Counts, repeat: Any) -> Segment:
    return Segment(repeat * counts.num_microbatches, _skew(counts))


def settled(counts: Counts, repeat: Any) -> Segment:
    M = counts.num_microbatches
    return Segment(repeat * M + _skew(counts), M - _skew(counts))


def last(counts: Counts) -> Segment:
    """The settled segment of the last repeat and the bubbles after it."""
    first = ticks_of(counts) - counts.num_microbatches
    return Segment(first, counts.num_microbatches, leaves=True)


def enter(counts: Counts) -> Segment:
    return Segment(0, counts.num_microbatches, enters=True)


def only_repeat(counts: Counts) -> Iterator[Segment]:
    """All ticks if there is one repeat: microbatches may enter and leave in the same tick."""
    end, M = ticks_of(counts), counts.num_microbatches
    cuts = sorted({0, M, end - M, end})
    for first, after in pairwise(cuts):
        yield Segment(first, after - first, enters=first < M, leaves=first >= end - M)


def _skew(counts: Counts) -> int:
    """Ticks that the last rank is behind the first."""
    return counts.hop * (counts.num_ranks - 1)


def segments(counts: Counts) -> list[Segment]:
    """All of them, in order."""
    final = counts.num_repeats - 1
    if final == 0:
        return [*only_repeat(counts)]
    middle = [part(counts, j) for j in range(1, final) for part in (mixed, settled)]
    return [enter(counts), *middle, mixed(counts, final), last(counts)]
