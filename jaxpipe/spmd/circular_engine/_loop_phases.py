"""The phases of a circular pipeline: its ticks, cut into one block for each repeat.

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

from ._shape import PipelineShape


class LoopPhase(NamedTuple):
    """A range of `length` ticks from `start` on.

    Microbatches enter in all of these ticks or in none, and leave in all of them or in none.
    """

    start: Any
    length: int
    enters: bool = False
    leaves: bool = False

    @property
    def ticks(self) -> Int[Array, " length"]:
        return self.start + jnp.arange(self.length)


def warmup(shape: PipelineShape) -> LoopPhase:
    """Returns the phase of repeat 0, in which microbatches enter."""
    return LoopPhase(0, shape.num_microbatches, enters=True)


def steady(shape: PipelineShape, repeat: Any) -> LoopPhase:
    """Returns the phase of a repeat that is neither the first nor the last."""
    M = shape.num_microbatches
    return LoopPhase(repeat * M, M)


def drain(shape: PipelineShape) -> LoopPhase:
    """Returns the phase of the last of several repeats, in which microbatches leave."""
    start = (shape.num_repeats - 1) * shape.num_microbatches
    return LoopPhase(start, shape.num_ticks - start, leaves=True)


def single_repeat(shape: PipelineShape) -> Iterator[LoopPhase]:
    """Yields the phases of a pipeline with one repeat.

    In such a pipeline microbatches may enter and leave in the same tick.
    """
    end, M = shape.num_ticks, shape.num_microbatches
    cuts = sorted({0, M, end - M, end})
    for start, after in pairwise(cuts):
        yield LoopPhase(start, after - start, enters=start < M, leaves=start >= end - M)
