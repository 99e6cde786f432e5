"""A schedule: for every rank the order of its actions, and nothing about time.

Two copies of the weights, as in DualPipe, need no notation: the same stage is on two ranks,
with different microbatches.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, singledispatch

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
