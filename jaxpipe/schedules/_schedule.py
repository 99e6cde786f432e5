"""A schedule: for every rank the order of its actions, and nothing about time.

Two copies of the weights, as in DualPipe, need no notation: the same stage stands on two ranks,
with different microbatches.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ._action import Action, Op, ScheduleStep, actions_of, parse_step


@dataclass(frozen=True)
class Schedule:
    """One program per rank: the actions it runs, in order.

    Prints as one line per rank, which `parse` reads back.
    """

    num_stages: int
    num_microbatches: int
    programs: tuple[tuple[ScheduleStep, ...], ...]

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, program)) for program in self.programs)


def parse(text: str) -> Schedule:
    """The inverse of `str(schedule)`: the counts are those of the actions named.

    Raises:
        ValueError: If a word is not an action, naming its line and place; or if there is none.
    """
    programs = tuple(
        tuple(_word(word, rank, place) for place, word in enumerate(line.split()))
        for rank, line in enumerate(text.split("\n"))
    )
    return from_programs(programs)


def _word(word: str, rank: int, place: int) -> ScheduleStep:
    try:
        return parse_step(word)
    except ValueError as error:
        raise ValueError(f"Rank {rank}, action {place}: {error}") from None


def from_programs(programs: tuple[tuple[ScheduleStep, ...], ...]) -> Schedule:
    """A schedule with as many stages and microbatches as its actions name."""
    actions = [action for program in programs for step in program for action in actions_of(step)]
    if not actions:
        raise ValueError("The schedule has no actions. Give one line of actions per rank.")
    num_stages = 1 + max(action.stage for action in actions)
    num_microbatches = 1 + max(action.microbatch for action in actions)
    return Schedule(num_stages, num_microbatches, programs)


def num_ranks(schedule: Schedule) -> int:
    return len(schedule.programs)


def num_slices(schedule: Schedule) -> int:
    """Sequence slices per microbatch; 1 where microbatches are not sliced."""
    return 1 + max((action.slice or 0 for _, action in enumerate_actions(schedule)), default=0)


def slice_ids(schedule: Schedule) -> tuple[int | None, ...]:
    """The slices every microbatch comes in; `None` alone where it is whole."""
    sliced = any(action.slice is not None for _, action in enumerate_actions(schedule))
    return tuple(range(num_slices(schedule))) if sliced else (None,)


def enumerate_actions(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Every action with its rank, rank by rank, pairs taken apart."""
    for rank, program in enumerate(schedule.programs):
        for step in program:
            for action in actions_of(step):
                yield rank, action


def stages_of_rank(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """The stages a rank holds, in forward order: its chunks."""
    program = schedule.programs[rank]
    return tuple(sorted({action.stage for step in program for action in actions_of(step)}))


def ranks_of_stage(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """The ranks that hold a copy of a stage; more than one only in schedules like DualPipe."""
    return tuple(
        sorted({rank for rank, action in enumerate_actions(schedule) if action.stage == stage})
    )


def ranks_by_stage(schedule: Schedule) -> dict[int, tuple[int, ...]]:
    """Returns the `ranks_of_stage` of every stage that has an action, found in one pass."""
    found: dict[int, set[int]] = {}
    for rank, action in enumerate_actions(schedule):
        found.setdefault(action.stage, set()).add(rank)
    return {stage: tuple(sorted(ranks)) for stage, ranks in sorted(found.items())}


def splits_backwards(schedule: Schedule) -> bool:
    """Whether any W runs apart from its I."""
    return any(action.op is Op.W for _, action in enumerate_actions(schedule))


def without_fused_pairs(schedule: Schedule) -> Schedule:
    """The same order with every fused pair taken apart into its forward, then its backward."""
    programs = tuple(
        tuple(action for step in program for action in actions_of(step))
        for program in schedule.programs
    )
    return Schedule(schedule.num_stages, schedule.num_microbatches, programs)


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a schedule, in its order: what evaluation runs."""
    programs = tuple(
        tuple(action for step in program for action in actions_of(step) if action.op is Op.F)
        for program in schedule.programs
    )
    return Schedule(schedule.num_stages, schedule.num_microbatches, programs)
