"""Seq1F1B: 1F1B over slices of the sequence instead of whole microbatches."""

from collections.abc import Iterator

from ..language._action import Action, Op
from ..language._schedule import Schedule
from ._require import require_positive


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
        yield from forwards[:warmup]
        for k, backward in enumerate(backwards):
            yield from forwards[warmup + k : warmup + k + 1]
            yield backward

    programs = tuple(tuple(program(stage)) for stage in range(num_stages))
    return Schedule(num_stages, num_microbatches, programs)
