"""Maps a rank's chunk to its stage, and back. p ranks, v chunks per rank.

    straight   stage = rank                                     one chunk
    loop       stage = chunk p + rank                           0 1 2 3 | 4 5 6 7
    V          even chunks forwards, odd chunks backwards       0 1 2 3 | 7 6 5 4

In a V the first and the last stage share rank 0, and a microbatch turns round without a transfer.
"""


def straight_stage(rank: int) -> int:
    """Returns the stage of a rank where every rank holds one."""
    return rank


def straight_rank_and_chunk(stage: int) -> tuple[int, int]:
    """Returns the (rank, chunk) of a stage, the inverse of `straight_stage`."""
    return stage, 0


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
