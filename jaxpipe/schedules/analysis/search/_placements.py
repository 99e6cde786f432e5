"""Placements: which rank has which stage.

straight   0 1 2 3                one chunk
loop       0 1 2 3 0 1 2 3        chunks in the order of the ranks
v          0 1 2 3 3 2 1 0        every other chunk in reverse; with 4 chunks a W
"""

from ...language._placement import loop_rank_and_chunk, v_rank_and_chunk


def rank_of_each_stage(name: str, ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Returns the placement of a name.

    Args:
        name: `straight`, `loop` or `v`.
        ranks: The number of ranks.
        chunks: The stages per rank.

    Returns:
        [ranks * chunks] the rank of every stage.

    Raises:
        ValueError: If no placement has that name.

    Example:
        >>> rank_of_each_stage("v", ranks=3, chunks=2)
        (0, 1, 2, 2, 1, 0)
    """
    if name not in ("straight", "loop", "v"):
        raise ValueError(f"`name` is {name!r}. Give straight, loop or v.")
    rank_and_chunk = v_rank_and_chunk if name == "v" else loop_rank_and_chunk
    return tuple(rank_and_chunk(stage, ranks)[0] for stage in range(ranks * chunks))


def usual_placements(ranks: int, max_chunks: int) -> list[tuple[int, ...]]:
    """Returns the placements that a search tries: straight, loops, a V and, of 4 chunks, a W."""
    loops = [rank_of_each_stage("loop", ranks, chunks) for chunks in range(1, max_chunks + 1)]
    turns = [rank_of_each_stage("v", ranks, chunks) for chunks in (2, 4) if chunks <= max_chunks]
    return list(dict.fromkeys([*loops, *turns]))
