"""A schedule: for every rank the order of its actions, and nothing about time.

Two copies of the weights, as in DualPipe, need no notation: the same stage is on two ranks, with
different microbatches. What outlives a step (weights, gradients, the optimizer's state) is stored
once: on one of these ranks, the owner of the stage.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, singledispatch
from itertools import count

from ._action import Action, Op, ScheduleStep, actions_of, parse_step


@singledispatch
def draw(value: object) -> str | None:
    """Returns a picture of a value as the text of an SVG file; None if none can be drawn.

    `io` registers how values are drawn: drawing builds on schedules, which cannot import it.
    """
    return None


@dataclass(frozen=True)
class Schedule:
    """One program per rank: the actions it runs, in order.

    Prints as one line per rank, which `parse` reads back. A notebook draws it.

    Attributes:
        num_stages: The number of stages of the model.
        num_microbatches: The number of microbatches.
        programs: [num_ranks] the actions and fused pairs of every rank, in order.

    Example:
        >>> from jaxpipe.schedules import build
        >>> schedule = build("gpipe", ranks=2, microbatches=2)
        >>> schedule.num_stages, len(schedule.programs)
        (2, 2)
    """

    num_stages: int
    num_microbatches: int
    programs: tuple[tuple[ScheduleStep, ...], ...]

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, program)) for program in self.programs)

    def __repr__(self) -> str:
        return f"Schedule({describe(self)})"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hashes all actions once, as functions that are cached by a schedule ask often."""
        return hash((self.num_stages, self.num_microbatches, self.programs))

    def _repr_svg_(self) -> str | None:
        return draw(self)


def describe(schedule: Schedule) -> str:
    """Returns the counts of a schedule and the operations that it has.

    Example:
        >>> from jaxpipe.schedules import build
        >>> describe(build("zbv", ranks=4, microbatches=8))
        '4 ranks, 8 stages, 8 microbatches, with F, I, W'
    """
    ops = {action.op for _, action in enumerate_actions(schedule)}
    counts = (
        (len(schedule.programs), "rank"),
        (schedule.num_stages, "stage"),
        (schedule.num_microbatches, "microbatch"),
    )
    plurals = {"rank": "ranks", "stage": "stages", "microbatch": "microbatches"}
    named = [f"{count} {noun if count == 1 else plurals[noun]}" for count, noun in counts]
    if num_slices(schedule) > 1:
        named.append(f"{num_slices(schedule)} slices")
    if ops:
        named.append(f"with {', '.join(op.name for op in Op if op in ops)}")
    return ", ".join(named)


def parse(text: str) -> Schedule:
    r"""Parses the text of a schedule, the inverse of `str(schedule)`.

    Args:
        text: One line of actions per rank.

    Returns:
        A schedule with as many stages and microbatches as its actions name. It is not checked.

    Raises:
        ValueError: If a word is not an action, naming its line and position; or if the text has no
            actions.

    Example:
        >>> parse("0F0 0B0\n1F0 1B0").num_stages
        2
    """
    programs = tuple(
        tuple(_word(word, rank, position) for position, word in enumerate(line.split()))
        for rank, line in enumerate(text.split("\n"))
    )
    return from_programs(programs)


def _word(word: str, rank: int, position: int) -> ScheduleStep:
    try:
        return parse_step(word)
    except ValueError as error:
        raise ValueError(f"Rank {rank}, action {position}: {error}") from None


def from_programs(programs: tuple[tuple[ScheduleStep, ...], ...]) -> Schedule:
    """Returns a schedule with as many stages and microbatches as its actions name."""
    actions = [action for program in programs for step in program for action in actions_of(step)]
    if not actions:
        raise ValueError("The schedule has no actions. Give one line of actions per rank.")
    num_stages = 1 + max(action.stage for action in actions)
    num_microbatches = 1 + max(action.microbatch for action in actions)
    return Schedule(num_stages, num_microbatches, programs)


def from_ranks(
    program: Callable[[int], Iterable[ScheduleStep]],
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 1,
) -> Schedule:
    """Returns a schedule in which every rank runs the steps of `program(rank)`."""
    programs = tuple(tuple(program(rank)) for rank in range(num_ranks))
    return Schedule(num_chunks * num_ranks, num_microbatches, programs)


def num_ranks(schedule: Schedule) -> int:
    """Returns the number of ranks.

    Args:
        schedule: A schedule of any family.

    Returns:
        The number.

    Example:
        >>> from jaxpipe.schedules import build
        >>> num_ranks(build("zbv", ranks=4, microbatches=8))
        4
    """
    return len(schedule.programs)


@lru_cache(maxsize=64)
def num_slices(schedule: Schedule) -> int:
    """Returns the number of sequence slices per microbatch; 1 if they are not sliced."""
    return 1 + max((action.slice or 0 for _, action in enumerate_actions(schedule)), default=0)


@lru_cache(maxsize=64)
def slice_ids(schedule: Schedule) -> tuple[int | None, ...]:
    """Returns the slices of every microbatch; `(None,)` if microbatches are not sliced."""
    sliced = any(action.slice is not None for _, action in enumerate_actions(schedule))
    return tuple(range(num_slices(schedule))) if sliced else (None,)


def enumerate_actions(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yields every action with its rank, rank by rank; fused pairs are split."""
    for rank, program in enumerate(schedule.programs):
        for step in program:
            for action in actions_of(step):
                yield rank, action


@lru_cache(maxsize=1_000)
def stages_of_rank(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """Returns the stages that a rank holds, its chunks, in forward order."""
    program = schedule.programs[rank]
    return tuple(sorted({action.stage for step in program for action in actions_of(step)}))


def ranks_of_stage(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """Returns the ranks that hold a copy of a stage; DualPipe has two, others one."""
    return ranks_by_stage(schedule).get(stage, ())


def ranks_by_stage(schedule: Schedule) -> dict[int, tuple[int, ...]]:
    """Returns the `ranks_of_stage` of every stage that has an action, found in one pass."""
    ranks_of: dict[int, set[int]] = {}
    for rank, action in enumerate_actions(schedule):
        ranks_of.setdefault(action.stage, set()).add(rank)
    return {stage: tuple(sorted(ranks)) for stage, ranks in sorted(ranks_of.items())}


@lru_cache(maxsize=64)
def splits_backwards(schedule: Schedule) -> bool:
    """Returns whether any W runs apart from its I."""
    return any(action.op is Op.W for _, action in enumerate_actions(schedule))


def without_fused_pairs(schedule: Schedule) -> Schedule:
    """Returns the schedule with every fused pair split: its forward, then its backward."""
    programs = tuple(
        tuple(action for step in program for action in actions_of(step))
        for program in schedule.programs
    )
    return Schedule(schedule.num_stages, schedule.num_microbatches, programs)


def forward_only(schedule: Schedule) -> Schedule:
    """Returns the forwards of a schedule, in its order, as evaluation runs them.

    Example:
        >>> from jaxpipe.schedules import build
        >>> print(forward_only(build("1f1b", ranks=2, microbatches=3)))
        0F0 0F1 0F2
        1F0 1F1 1F2
    """
    programs = tuple(
        tuple(action for step in program for action in actions_of(step) if action.op is Op.F)
        for program in schedule.programs
    )
    return Schedule(schedule.num_stages, schedule.num_microbatches, programs)


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
