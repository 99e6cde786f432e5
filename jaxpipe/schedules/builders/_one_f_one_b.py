"""1F1B, eager and over slices: a rank alternates forwards and backwards after a warmup."""

from collections.abc import Iterator

from ..language._action import Action, Op
from ..language._schedule import Schedule, from_ranks
from ._interleaved import alternate
from ._require import require_positive


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B: runs a backward as soon as one is ready, so that early stages hold less.

    Example:
        >>> print(one_f_one_b(2, 3))
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2

    References:
        Narayanan et al., 2021, arXiv 2104.04473, figure 4 (top); as PipeDream-Flush, arXiv
        2006.09503.
    """
    require_positive(num_stages=num_stages, num_microbatches=num_microbatches)

    def program(stage: int) -> Iterator[Action]:
        warmup = min(num_stages - 1 - stage, num_microbatches)
        steady = num_microbatches - warmup
        for m in range(warmup):
            yield Action(stage, Op.F, m)
        for m in range(steady):
            yield Action(stage, Op.F, warmup + m)
            yield Action(stage, Op.B, m)
        for m in range(steady, num_microbatches):
            yield Action(stage, Op.B, m)

    return from_ranks(program, num_stages, num_microbatches)


def eager_one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Eager 1F1B: doubles the warmup of 1F1B, so that a transfer has a forward's time to arrive.

    References:
        Zhuang et al., 2022, arXiv 2211.05322.
    """
    require_positive(num_stages=num_stages, num_microbatches=num_microbatches)

    def program(stage: int) -> Iterator[Action]:
        warmup = min(2 * (num_stages - stage) - 1, num_microbatches)
        for m in range(warmup):
            yield Action(stage, Op.F, m)
        for m in range(num_microbatches):
            yield Action(stage, Op.B, m)
            if warmup + m < num_microbatches:
                yield Action(stage, Op.F, warmup + m)

    return from_ranks(program, num_stages, num_microbatches)


def seq1f1b(num_stages: int, num_microbatches: int, *, num_slices: int = 2) -> Schedule:
    """Seq1F1B: runs 1F1B over slices of sequences, which fill the pipeline sooner and hold less.

    With causal attention a slice needs the slices before it in the forward, and the gradients of
    those after it in the backward, which passes through a microbatch's slices from the last to the
    first.

    References:
        Sun et al., 2024, arXiv 2406.03488, figure 2.
    """
    require_positive(
        num_stages=num_stages, num_microbatches=num_microbatches, num_slices=num_slices
    )
    slices = range(num_slices)

    def program(stage: int) -> Iterator[Action]:
        forwards = [Action(stage, Op.F, m, s) for m in range(num_microbatches) for s in slices]
        backwards = [
            Action(stage, Op.B, m, s) for m in range(num_microbatches) for s in reversed(slices)
        ]
        warmup = num_stages - 1 - stage + num_slices - 1
        return alternate(forwards, backwards, warmup)

    return from_ranks(program, num_stages, num_microbatches)
