"""Maps a rank's chunk to its stage. p ranks, v chunks per rank.

    straight   stage = rank, a loop of one chunk                0 1 2 3
    loop       stage = chunk p + rank                           0 1 2 3 | 4 5 6 7
    v          even chunks forwards, odd chunks backwards       0 1 2 3 | 7 6 5 4; of 4 chunks a W
    both_ways  stage = rank, and a copy of it on rank p - 1 - rank

In a V the first and the last stage share rank 0, and a microbatch turns round without a transfer.
"""

from collections.abc import Callable
from itertools import product
from typing import Literal, NamedTuple

Placement = Literal["straight", "loop", "v", "both_ways"]


def loop_stage(rank: int, chunk: int, num_ranks: int) -> int:
    """Returns the stage of a rank's chunk where stages go round the ranks, as in Megatron."""
    return chunk * num_ranks + rank


def v_stage(rank: int, chunk: int, num_ranks: int) -> int:
    """Returns the stage of a chunk where stages go down the ranks and up: arXiv 2405.15362."""
    position = rank if chunk % 2 == 0 else num_ranks - 1 - rank
    return chunk * num_ranks + position


class OnOneRank(NamedTuple):
    """A placement of every stage on one rank.

    Attributes:
        stage: `(rank, chunk, num_ranks) -> stage`.
        searched_chunks: The numbers of chunks that a search tries. None: all.
    """

    stage: Callable[[int, int, int], int]
    searched_chunks: tuple[int, ...] | None = None


PLACEMENTS = {
    "straight": OnOneRank(loop_stage, (1,)),
    "loop": OnOneRank(loop_stage),
    "v": OnOneRank(v_stage, (2, 4)),
}
"""The placements that have every stage once, by name."""


def rank_of_each_stage(name: str, ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Returns [ranks * chunks] the rank of every stage in a named placement.

    Example:
        >>> rank_of_each_stage("v", ranks=3, chunks=2)
        (0, 1, 2, 2, 1, 0)
    """
    if name not in PLACEMENTS:
        raise ValueError(f"`name` is {name!r}. Give one of {', '.join(PLACEMENTS)}.")
    stage_of, places = PLACEMENTS[name].stage, product(range(ranks), range(chunks))
    rank_of = {stage_of(rank, chunk, ranks): rank for rank, chunk in places}
    return tuple(rank_of[stage] for stage in range(ranks * chunks))


def usual_placements(ranks: int, max_chunks: int) -> list[tuple[int, ...]]:
    """Returns the ranks of stages in all placements of up to so many chunks, each once.

    Example:
        >>> usual_placements(ranks=2, max_chunks=2)
        [(0, 1), (0, 1, 0, 1), (0, 1, 1, 0)]
    """
    counts = range(1, max_chunks + 1)
    tried = (
        rank_of_each_stage(name, ranks, chunks)
        for name, placement in PLACEMENTS.items()
        for chunks in counts
        if placement.searched_chunks is None or chunks in placement.searched_chunks
    )
    return list(dict.fromkeys(tried))
