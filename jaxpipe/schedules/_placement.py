"""Which stage a rank's chunk is, and back. p ranks, v chunks per rank.

    straight   stage = rank                                     one chunk
    loop       stage = chunk p + rank                           0 1 2 3 | 4 5 6 7
    V          even chunks forwards, odd chunks backwards       0 1 2 3 | 7 6 5 4

In a V the first and the last stage share rank 0, and a microbatch turns round without a transfer.
"""


def straight_stage(rank: int) -> int:
    """The stage of a rank that holds one."""
    return rank


def straight_rank_and_chunk(stage: int) -> tuple[int, int]:
    """The (rank, chunk) of a stage."""
    return stage, 0


def loop_stage(rank: int, chunk: int, num_ranks: int) -> int:
    """The stage of a rank's chunk where stages go round the ranks, as Megatron has it."""
    return chunk * num_ranks + rank


def loop_rank_and_chunk(stage: int, num_ranks: int) -> tuple[int, int]:
    """The (rank, chunk) of a stage, the inverse of `loop_stage`."""
    chunk, rank = divmod(stage, num_ranks)
    return rank, chunk


def v_stage(rank: int, chunk: int, num_ranks: int) -> int:
    """The stage of a rank's chunk where stages go down the ranks and up again: arXiv 2405.15362."""
    place = rank if chunk % 2 == 0 else num_ranks - 1 - rank
    return chunk * num_ranks + place


def v_rank_and_chunk(stage: int, num_ranks: int) -> tuple[int, int]:
    """The (rank, chunk) of a stage, the inverse of `v_stage`."""
    chunk, place = divmod(stage, num_ranks)
    return (place if chunk % 2 == 0 else num_ranks - 1 - place), chunk
