"""Maps a rank's chunk to its stage, and back. p ranks, v chunks per rank.

    straight   stage = rank, a loop of one chunk                0 1 2 3
    loop       stage = chunk p + rank                           0 1 2 3 | 4 5 6 7
    v          even chunks forwards, odd chunks backwards       0 1 2 3 | 7 6 5 4; of 4 chunks a W
    both_ways  stage = rank, and a copy of it on rank p - 1 - rank

In a V the first and the last stage share rank 0, and a microbatch turns round without a transfer.
"""

from typing import Literal

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


def rank_of_each_stage(name: str, ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Returns [ranks * chunks] the rank of every stage in a named placement.

    Example:
        >>> rank_of_each_stage("v", ranks=3, chunks=2)
        (0, 1, 2, 2, 1, 0)
    """
    if name not in ("straight", "loop", "v"):
        raise ValueError(f"`name` is {name!r}. Give straight, loop or v.")
    rank_and_chunk = v_rank_and_chunk if name == "v" else loop_rank_and_chunk
    return tuple(rank_and_chunk(stage, ranks)[0] for stage in range(ranks * chunks))
