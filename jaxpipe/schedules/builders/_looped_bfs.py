"""Breadth-first: every microbatch passes a chunk of a rank before the next chunk begins.

GPipe has one chunk per rank. With several, a rank needs each chunk's weights once per direction,
which is what fully sharded weights want.
"""

from collections.abc import Iterator

from ..language._action import Action, Op
from ..language._placement import loop_stage
from ..language._schedule import Schedule, from_ranks
from ._require import require, require_positive


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """GPipe: fills the pipeline once and drains it once, holding every microbatch in between.

    Example:
        >>> print(gpipe(2, 2))
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1

    References:
        Huang et al., 2019, arXiv 1811.06965.
    """
    require_positive(num_stages=num_stages, num_microbatches=num_microbatches)
    programs = tuple(
        tuple(Action(stage, op, m) for op in (Op.F, Op.B) for m in range(num_microbatches))
        for stage in range(num_stages)
    )
    return Schedule(num_stages, num_microbatches, programs)


def looped_bfs(num_ranks: int, num_microbatches: int, *, num_chunks: int = 2) -> Schedule:
    """Looped BFS: runs all microbatches chunk by chunk; the backward retraces the forward.

    References:
        Lamy-Poirier, 2023, arXiv 2211.05953, figure 4d.
    """
    require_positive(num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)

    def program(rank: int) -> Iterator[Action]:
        for chunk in range(num_chunks):
            for m in range(num_microbatches):
                yield Action(loop_stage(rank, chunk, num_ranks), Op.F, m)
        for chunk in reversed(range(num_chunks)):
            for m in reversed(range(num_microbatches)):
                yield Action(loop_stage(rank, chunk, num_ranks), Op.B, m)

    return from_ranks(program, num_ranks, num_microbatches, num_chunks)


def circular(num_ranks: int, num_microbatches: int, *, num_chunks: int = 2) -> Schedule:
    """MaxText's and praxis's circular pipeline: runs a loop over repeats, and its transpose.

    Rank 0 begins repeat k + 1 when the whole batch has passed repeat k, and the transpose of the
    loop runs it backwards. That is breadth-first order; but the buffers of the loop require that
    the ranks divide the microbatches.
    """
    require_positive(num_ranks=num_ranks, num_microbatches=num_microbatches)
    require(
        num_microbatches % num_ranks == 0,
        f"`num_microbatches` is {num_microbatches}, no multiple of {num_ranks} ranks.",
        f"Give {max(1, num_microbatches // num_ranks) * num_ranks}, or choose looped_bfs.",
    )
    return looped_bfs(num_ranks, num_microbatches, num_chunks=num_chunks)


def circular_ticks(
    num_ranks: int, num_chunks: int, num_microbatches: int, forwarding_delay: int = 1
) -> int:
    """Returns the ticks of a circular pipeline: M * R of work and d * (S - 1) of bubble.

    Example:
        >>> circular_ticks(4, 2, 8)
        19
    """
    return num_microbatches * num_chunks + forwarding_delay * (num_ranks - 1)
