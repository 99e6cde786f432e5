"""The phases of a circular pipeline: its ticks, cut into one block for each repeat.

Rank 0 begins repeat j at tick j * M, the first of block j, and rank r at tick j * M + r * d, inside
the block: until then it works on repeat j - 1. So a rank needs the weights of two repeats in a
block, and those of a third can be gathered meanwhile. Microbatches enter in the first block and
leave in the last, which also includes the ticks in which the pipeline drains. In the last block
they leave only after d * (S - 1) ticks; results that the last rank writes to the stream before that
move down to rank 0 and are dropped.

The repeats between the first and the last, and the ticks of each block, run in a `lax.scan` or are
unrolled (`run_repeats`, `run_ticks`).
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from ._shape import PipelineShape

Carry = TypeVar("Carry")


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


def run_ticks(
    tick: Callable[[Carry, Any], Carry],
    carry: Carry,
    phase: LoopPhase,
    *,
    scan: bool,
    reverse: bool = False,
) -> Carry:
    """Runs the ticks of a phase.

    Args:
        tick: `(carry, index of the tick) -> carry`.
        carry: What the ticks hand on.
        phase: The phase.
        scan: Whether the ticks run in a `lax.scan`. If not, they are unrolled.
        reverse: Whether the last tick of the phase runs first.

    Returns:
        The carry after the phase.
    """
    if scan:
        return lax.scan(lambda c, t: (tick(c, t), None), carry, phase.ticks, reverse=reverse)[0]
    offsets = range(phase.length)
    for offset in reversed(offsets) if reverse else offsets:
        carry = tick(carry, phase.start + offset)
    return carry


def run_repeats(
    block: Callable[[Carry, Any], Carry], carry: Carry, repeats: range, *, scan: bool
) -> Carry:
    """Runs the blocks of `repeats`, in a `lax.scan` if there are several, else unrolled.

    Args:
        block: `(carry, index of the repeat) -> carry`.
        carry: What the blocks hand on.
        repeats: The indices, in the order in which they run.
        scan: Whether several blocks run in a `lax.scan`. If not, they are unrolled.

    Returns:
        The carry after the last block.
    """
    if scan and len(repeats) > 1:
        indices = jnp.arange(repeats.start, repeats.stop, repeats.step)
        return lax.scan(lambda c, j: (block(c, j), None), carry, indices)[0]
    for j in repeats:
        carry = block(carry, j)
    return carry
