"""Copies of weights: which rank sends those of which stage to which other rank.

A rank runs some stages, its chunks, and stores some of them. If every stage is on one rank, it
stores what it runs. Otherwise, as in DualPipe, its other chunks are copies of what other ranks
store, which they send before the first tick; the gradients take the same way back.
"""

from typing import NamedTuple

from ..builders._require import require
from ..language._schedule import Schedule, num_ranks, stages_of_rank, stored_stages


class RankAndChunk(NamedTuple):
    """The rank that stores a stage, and which of the stages that it stores it is."""

    rank: int
    chunk: int


class CopyRound(NamedTuple):
    """One permutation of the ranks, in which each sends at most one stage and receives one.

    Attributes:
        receivers: [num_ranks] the rank to which each rank sends.
        stored_chunks: [num_ranks] the chunk, of those that it stores, that each rank sends.
        copied_chunks: [num_ranks] the chunk, of those that it runs, that each rank receives; -1 if
            what it receives is of no use.
    """

    receivers: tuple[int, ...]
    stored_chunks: tuple[int, ...]
    copied_chunks: tuple[int, ...]


class WeightCopies(NamedTuple):
    """How ranks obtain the weights of the stages that they run from those that they store.

    Attributes:
        chunks: [chunks that a rank runs, num_ranks] the stored chunk that each is; -1 for a copy.
    """

    chunks: tuple[tuple[int, ...], ...]
    rounds: tuple[CopyRound, ...]


def rank_and_chunk_by_stage(schedule: Schedule) -> dict[int, RankAndChunk]:
    """Returns the rank that stores every stage and its chunk there, in the order of ranks."""
    stored, ranks = stored_stages(schedule), range(num_ranks(schedule))
    _require_equal("hold", [len(stages_of_rank(schedule, rank)) for rank in ranks])
    _require_equal("store", list(map(len, stored)))
    return {
        stage: RankAndChunk(rank, chunk)
        for rank, stages in enumerate(stored)
        for chunk, stage in enumerate(stages)
    }


def _require_equal(verb: str, counts: list[int]) -> None:
    require(
        len(set(counts)) == 1,
        f"Ranks {verb} {', '.join(map(str, counts))} stages, and all run one program.",
        "Give a schedule with as many on every rank.",
    )


def weight_copies(schedule: Schedule) -> WeightCopies | None:
    """Returns the copies of weights between ranks; None if every stage is on one rank."""
    owner = rank_and_chunk_by_stage(schedule)
    run = [stages_of_rank(schedule, rank) for rank in range(num_ranks(schedule))]
    chunks = tuple(
        tuple(owner[s].chunk if owner[s].rank == rank else -1 for rank, s in enumerate(stages))
        for stages in zip(*run, strict=True)
    )
    copies = [
        (owner[stage], RankAndChunk(rank, chunk))
        for rank, stages in enumerate(run)
        for chunk, stage in enumerate(stages)
        if owner[stage].rank != rank
    ]
    return WeightCopies(chunks, _rounds(copies, len(run))) if copies else None


def _rounds(
    copies: list[tuple[RankAndChunk, RankAndChunk]], num_ranks: int
) -> tuple[CopyRound, ...]:
    """Assigns every (source, target) to the first round in which both ranks are free."""
    rounds: list[dict[int, tuple[int, RankAndChunk]]] = []
    for source, target in copies:
        for sent in rounds:
            receives = {receiver.rank for _, receiver in sent.values()}
            if source.rank not in sent and target.rank not in receives:
                break
        else:
            rounds.append(sent := {})
        sent[source.rank] = source.chunk, target
    return tuple(_permutation(sent, num_ranks) for sent in rounds)


def _permutation(sent: dict[int, tuple[int, RankAndChunk]], num_ranks: int) -> CopyRound:
    """Completes a round to a permutation of all ranks."""
    copied = {target.rank: target.chunk for _, target in sent.values()}
    idle = iter(rank for rank in range(num_ranks) if rank not in copied)
    ranks = range(num_ranks)
    return CopyRound(
        tuple(sent[rank][1].rank if rank in sent else next(idle) for rank in ranks),
        tuple(sent[rank][0] if rank in sent else 0 for rank in ranks),
        tuple(copied.get(rank, -1) for rank in ranks),
    )
