"""Maps a rank's chunk to its stage, and back. p ranks, v chunks per rank.

    straight   stage = rank, a loop of one chunk                0 1 2 3
    loop       stage = chunk p + rank                           0 1 2 3 | 4 5 6 7
    v          even chunks forwards, odd chunks backwards       0 1 2 3 | 7 6 5 4; of 4 chunks a W
    both_ways  stage = rank, and a copy of it on rank p - 1 - rank

In a V the first and the last stage share rank 0, and a microbatch turns round without a transfer.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

Placement = Literal["straight", "loop", "v", "both_ways"]


def loop_stage(rank: int, chunk: int, num_ranks: int) -> int:
    """Returns the stage of a rank's chunk where stages go round the ranks, as in Megatron."""
    return chunk * num_ranks + rank


def loop_rank_and_chunk(stage: int, num_ranks: int) -> tuple[int, int]:
    """Returns the (rank, chunk) of a stage, the inverse of `loop_stage`."""
    chunk, rank = divmod(stage, num_ranks)
    return rank, chunk


def v_stage(rank: int, chunk: int, num_ranks: int) -> int:
    """Returns the stage of a chunk where stages go down the ranks and up: arXiv 2405.15362."""
    position = rank if chunk % 2 == 0 else num_ranks - 1 - rank
    return chunk * num_ranks + position


def v_rank_and_chunk(stage: int, num_ranks: int) -> tuple[int, int]:
    """Returns the (rank, chunk) of a stage, the inverse of `v_stage`."""
    chunk, position = divmod(stage, num_ranks)
    return (position if chunk % 2 == 0 else num_ranks - 1 - position), chunk


class _OneRank(NamedTuple):
    """A placement of every stage on one rank.

    Attributes:
        rank_and_chunk: `(stage, num_ranks) -> (rank, chunk)`.
        searched_chunks: The numbers of chunks that a search tries. None: all.
    """

    rank_and_chunk: Callable[[int, int], tuple[int, int]]
    searched_chunks: tuple[int, ...] | None = None


_ON_ONE_RANK = {
    "straight": _OneRank(loop_rank_and_chunk, (1,)),
    "loop": _OneRank(loop_rank_and_chunk),
    "v": _OneRank(v_rank_and_chunk, (2, 4)),
}


def rank_of_each_stage(name: str, ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Returns [ranks * chunks] the rank of every stage in a named placement.

    Example:
        >>> rank_of_each_stage("v", ranks=3, chunks=2)
        (0, 1, 2, 2, 1, 0)
    """
    if name not in _ON_ONE_RANK:
        raise ValueError(f"`name` is {name!r}. Give one of {', '.join(_ON_ONE_RANK)}.")
    rank_and_chunk = _ON_ONE_RANK[name].rank_and_chunk
    return tuple(rank_and_chunk(stage, ranks)[0] for stage in range(ranks * chunks))


def usual_placements(ranks: int, max_chunks: int) -> list[tuple[int, ...]]:
    """Returns the ranks of stages in all placements of up to so many chunks, each once.

    Example:
        >>> usual_placements(ranks=2, max_chunks=2)
        [(0, 1), (0, 1, 0, 1), (0, 1, 1, 0)]
    """
    counts = range(1, max_chunks + 1)
    tried = (
        rank_of_each_stage(name, ranks, chunks)
        for name, placement in _ON_ONE_RANK.items()
        for chunks in counts
        if placement.searched_chunks is None or chunks in placement.searched_chunks
    )
    return list(dict.fromkeys(tried))
