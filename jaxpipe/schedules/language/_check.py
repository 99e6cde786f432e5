"""Checks a schedule: complete, in an order that its dependencies allow, free from deadlock."""

from functools import lru_cache
from itertools import product

from ..._input import shorten
from ._action import Action, Op, actions_of
from ._dependencies import (
    ResultKey,
    ScheduleError,
    output_keys,
    text_with_marker,
    walk_topologically,
)
from ._schedule import Schedule, slice_ids

# The position of each result: (rank, index in the rank's program, action).
_Places = dict[ResultKey, tuple[int, int, Action]]


def check(schedule: Schedule) -> Schedule:
    """Returns `schedule` if it can run and computes every gradient once.

    Every stage, microbatch and slice has one F and either one B or one I and one W, on one rank;
    and the programs, run in order, never deadlock.

    Args:
        schedule: The schedule that is checked.

    Returns:
        `schedule` itself.

    Raises:
        ScheduleError: If an action is missing, duplicated, out of range or on another rank than its
            forward, or if ranks wait for each other. The message names the action and its rank and
            marks it in the text of the schedule where that helps.

    Example:
        >>> from jaxpipe.schedules import build
        >>> print(check(build("1f1b", ranks=2, microbatches=2)))
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1 1B1
    """
    _check(schedule)
    return schedule


@lru_cache(maxsize=8)  # front door, trainer and engines each check what they are given
def _check(schedule: Schedule) -> None:
    places = _find(schedule)
    _check_complete(schedule, places)
    _check_same_rank(schedule, places)
    for _ in walk_topologically(schedule):
        pass  # raises if ranks wait for each other


def _find(schedule: Schedule) -> _Places:
    """Returns every result with its position; refuses duplicates and indices out of range."""
    slices = slice_ids(schedule)
    places: _Places = {}
    for rank, program in enumerate(schedule.programs):
        for position, step in enumerate(program):
            for action in actions_of(step):
                problem = _out_of_range(action, schedule, slices)
                here = rank, position, action
                for result in output_keys(action):
                    if not problem and result in places:
                        problem = _twice(Action(*result), places[result])
                    places[result] = here
                if problem:
                    raise ScheduleError(
                        f"Rank {rank} runs {action}, {problem}:\n"
                        f"{text_with_marker(schedule, rank, position)}"
                    )
    return places


def _out_of_range(action: Action, schedule: Schedule, slices: tuple[int | None, ...]) -> str:
    if not 0 <= action.stage < schedule.num_stages:
        return f"but there are only {schedule.num_stages} stages, counted from 0"
    if not 0 <= action.microbatch < schedule.num_microbatches:
        return f"but there are only {schedule.num_microbatches} microbatches, counted from 0"
    if action.slice not in slices:
        return f"but other microbatches come in slices s0 to s{len(slices) - 1}: name one of them"
    return ""


def _twice(result: Action, first: tuple[int, int, Action]) -> str:
    rank, _, action = first
    return f"but rank {rank} has already run {action}" + (
        "" if action == result else f", which includes {result}"
    )


def _check_complete(schedule: Schedule, places: _Places) -> None:
    slices = slice_ids(schedule)
    # Every result that was found is in range and was found once, so counting them is enough.
    if len(places) == 3 * schedule.num_stages * schedule.num_microbatches * len(slices):
        return
    every = product(
        range(schedule.num_stages), range(schedule.num_microbatches), slices, (Op.F, Op.I, Op.W)
    )
    for stage, microbatch, piece, op in every:
        if (stage, op, microbatch, piece) not in places:
            result = Action(stage, op, microbatch, piece)
            raise ScheduleError(_absent(schedule, result, places))


def _absent(schedule: Schedule, result: Action, places: _Places) -> str:
    """Says which action is missing, and on which rank the rest of its microbatch is."""
    ranks_of_stage, ranks_of_microbatch = [], []
    for (stage, _, microbatch, _), (rank, _, _) in places.items():
        if stage == result.stage:
            ranks_of_stage.append(rank)
            if microbatch == result.microbatch:
                ranks_of_microbatch.append(rank)
    ranks = ranks_of_microbatch or ranks_of_stage
    where = f"rank {ranks[0]}" if ranks else "any rank"
    whole = Action(result.stage, Op.B, result.microbatch, result.slice)
    neither_half = result.op is Op.I and output_keys(whole)[1] not in places
    name = f"{result} (or {whole})" if neither_half else f"{result}"
    return f"No rank runs {name}. Add it to {where}:\n{shorten(str(schedule), 2000)}"


def _check_same_rank(schedule: Schedule, places: _Places) -> None:
    """Checks that every backward runs on the rank that holds its forward's activations."""
    for (stage, _, microbatch, piece), (rank, position, action) in places.items():
        home = places[stage, Op.F, microbatch, piece][0]
        if rank != home:
            forward = Action(stage, Op.F, microbatch, piece)
            raise ScheduleError(
                f"Rank {rank} runs {action}, but {forward} and its activations are on rank {home}. "
                f"Move one of them:\n{text_with_marker(schedule, rank, position)}"
            )
