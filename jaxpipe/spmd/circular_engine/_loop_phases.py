"""The ticks of a circular pipeline as loops: one over all (two from 8 repeats on), or one a repeat.

Rank 0 begins repeat j at tick j * M, the first of block j, and rank r at tick j * M + r * d, inside
the block: until then it works on repeat j - 1. The last block also includes the ticks in which the
pipeline drains. One loop compiles fastest.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from .._options import EngineOptions
from ._shape import PipelineShape

Carry = TypeVar("Carry")


class LoopPhase(NamedTuple):
    """A range of `length` ticks from `start` on.

    Attributes:
        program: All ticks that run in the program of this phase: its own, and those of other blocks
            if a loop runs several. Empty where ticks do not depend on it.
    """

    start: Any
    length: int
    program: range = range(0)

    @property
    def ticks(self) -> Int[Array, " length"]:
        return self.start + jnp.arange(self.length, dtype=jnp.int32)


def phase_of(shape: PipelineShape, repeats: range) -> LoopPhase:
    """Returns the phase of the blocks of `repeats`, in one loop."""
    M = shape.num_microbatches
    end = shape.num_ticks if repeats.stop == shape.num_repeats else repeats.stop * M
    ticks = range(repeats.start * M, end)
    return LoopPhase(ticks.start, len(ticks), ticks)


def block_of(shape: PipelineShape, repeat: Any, repeats: range) -> LoopPhase:
    """Returns the phase of the block of `repeat`, in a loop over the blocks of `repeats`."""
    M = shape.num_microbatches
    return LoopPhase(repeat * M, M, phase_of(shape, repeats).program)


def run_all_ticks(
    tick: Callable[[LoopPhase, Carry, Any], Carry],
    carry: Carry,
    shape: PipelineShape,
    repeats: range,
    *,
    options: EngineOptions,
    reverse: bool = False,
) -> Carry:
    """Runs the ticks of some repeats by `tick`: `(phase, carry, index of the tick) -> carry`.

    They run in one loop; or in a block for each repeat, if blocks or their ticks are unrolled.
    """

    def run(carry: Carry, phase: LoopPhase) -> Carry:
        f = partial(tick, phase)
        return run_ticks(f, carry, phase, scan=options.scan_ticks, reverse=reverse)

    scan_repeats = options.scan_repeats
    if scan_repeats and options.scan_ticks:
        return run(carry, phase_of(shape, repeats))
    final = shape.num_repeats - 1
    in_blocks = range(repeats.start, min(repeats.stop, final))

    def block(carry: Carry, j: Any) -> Carry:
        return run(carry, block_of(shape, j, in_blocks))

    def run_final(carry: Carry) -> Carry:
        return run(carry, phase_of(shape, range(final, final + 1))) if final in repeats else carry

    if reverse:
        return run_repeats(block, run_final(carry), in_blocks[::-1], scan=scan_repeats)
    return run_final(run_repeats(block, carry, in_blocks, scan=scan_repeats))


def run_ticks(
    tick: Callable[[Carry, Any], Carry],
    carry: Carry,
    phase: LoopPhase,
    *,
    scan: bool,
    reverse: bool = False,
) -> Carry:
    """Runs the ticks of a phase by `tick`: `(carry, index of the tick) -> carry`."""
    if scan:
        return lax.scan(lambda c, t: (tick(c, t), None), carry, phase.ticks, reverse=reverse)[0]
    offsets = range(phase.length)
    for offset in reversed(offsets) if reverse else offsets:
        carry = tick(carry, phase.start + offset)
    return carry


def run_repeats(
    block: Callable[[Carry, Any], Carry], carry: Carry, repeats: range, *, scan: bool
) -> Carry:
    """Runs the blocks of `repeats`, in a `lax.scan` if there are several, else unrolled."""
    if scan and len(repeats) > 1:
        indices = jnp.arange(repeats.start, repeats.stop, repeats.step, dtype=jnp.int32)
        return lax.scan(lambda c, j: (block(c, j), None), carry, indices)[0]
    for j in repeats:
        carry = block(carry, j)
    return carry
