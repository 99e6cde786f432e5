"""Where weights are stored and where microbatches run, if a stage is on several ranks.

In DualPipe a stage is on two ranks, and a microbatch runs it on one of them. What outlives a
step (weights, gradients, the optimizer's state) is stored once: on one of these ranks, the owner of
the stage.
"""

from functools import lru_cache
from itertools import count

from ._schedule import Schedule, enumerate_actions, num_ranks, ranks_by_stage, stages_of_rank


def owners(schedule: Schedule) -> dict[int, int]:
    """Returns the rank that stores each stage: one of those that run it.

    Ranks store as equally many stages as the schedule allows.

    Example:
        >>> from jaxpipe.schedules import build
        >>> owners(build("dualpipe", ranks=4, microbatches=8))
        {0: 0, 1: 1, 2: 2, 3: 3}
    """
    candidates = ranks_by_stage(schedule)
    return next(owned for most in count(1) if (owned := _assign(candidates, most)) is not None)


@lru_cache(maxsize=64)
def stored_stages(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Returns [num_ranks] the stages of which every rank is the owner, in forward order."""
    owner = owners(schedule)
    ranks = range(num_ranks(schedule))
    return tuple(tuple(s for s in sorted(owner) if owner[s] == rank) for rank in ranks)


def num_copies(schedule: Schedule) -> int:
    """Returns the most stages that a rank runs and another one owns."""
    ranks = enumerate(stored_stages(schedule))
    return max(len(stages_of_rank(schedule, rank)) - len(own) for rank, own in ranks)


def _assign(candidates: dict[int, tuple[int, ...]], most: int) -> dict[int, int] | None:
    """Returns a rank for every stage, with at most `most` stages on a rank; None if it is too few.

    A stage that finds all its ranks full moves another stage to make room: Kuhn's matching.
    """
    stages_of: dict[int, list[int]] = {}

    def insert(stage: int, tried: set[int]) -> bool:
        free = [rank for rank in candidates[stage] if len(stages_of.setdefault(rank, [])) < most]
        if free:
            stages_of[free[0]].append(stage)
            return True
        for rank in candidates[stage]:
            if rank in tried:
                continue
            tried.add(rank)
            for other in stages_of[rank]:
                if insert(other, tried):
                    stages_of[rank][stages_of[rank].index(other)] = stage
                    return True
        return False

    if not all(insert(stage, set()) for stage in candidates):
        return None
    rank_of = {stage: rank for rank, stages in stages_of.items() for stage in stages}
    return {stage: rank_of[stage] for stage in candidates}


def check_carried_state(schedule: Schedule) -> None:
    """Checks that the slices of a microbatch, which carry a state, share a rank in each stage."""
    ranks = rank_by_microbatch(schedule)
    for rank, action in enumerate_actions(schedule):
        home = ranks[action.stage, action.microbatch]
        if rank != home:
            raise ValueError(
                f"`schedule` runs slices of microbatch {action.microbatch} of stage {action.stage} "
                f"on ranks {rank} and {home}. They carry a state: run them on one rank."
            )


def rank_by_microbatch(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Returns the rank that runs a stage for a microbatch, by (stage, microbatch)."""
    return {(action.stage, action.microbatch): rank for rank, action in enumerate_actions(schedule)}
