"""Slices of sequences on a grid: each runs as a microbatch that carries a state to the next.

A schedule with slices runs those of a microbatch in order, forwards from the first to the last and
backwards from the last to the first. A rank keeps the order among its forwards and among its
backwards when it is put on a grid, so a grid of slices is one of as many microbatches: piece
`microbatch * num_slices + slice`.
"""

from dataclasses import replace
from typing import NamedTuple

from ..language._action import Action, Op, ScheduleStep, actions_of
from ..language._schedule import Schedule, num_slices, slice_ids
from ._slots import Lifetime, action_times, allocate
from ._ticks import Ticks


def slices_as_microbatches(schedule: Schedule) -> Schedule:
    """Returns a schedule of `num_microbatches * num_slices` microbatches without slices.

    Example:
        >>> from jaxpipe.schedules import build
        >>> print(slices_as_microbatches(build("seq1f1b", ranks=1, microbatches=1, slices=2)))
        0F0 0F1 0B1 0B0
    """
    slices = num_slices(schedule)

    def piece(action: Action) -> Action:
        number = action.microbatch * slices + (action.slice or 0)
        return Action(action.stage, action.op, number)

    programs = tuple(
        tuple(piece(action) for step in program for action in actions_of(step))
        for program in schedule.programs
    )
    return Schedule(schedule.num_stages, schedule.num_microbatches * slices, programs)


def ticks_of_pieces(ticks: Ticks) -> Ticks:
    """Returns a grid whose slices are microbatches; one without slices is returned as it is."""
    if slice_ids(ticks.schedule) == (None,):
        return ticks
    return replace(ticks, schedule=slices_as_microbatches(ticks.schedule))


def ticks_of_slices(ticks: Ticks, slices: tuple[int | None, ...]) -> Ticks:
    """Returns a grid with slices again: the inverse of `ticks_of_pieces`."""

    def action(step: ScheduleStep) -> Action:
        (piece,) = actions_of(step)
        microbatch, index = divmod(piece.microbatch, len(slices))
        return Action(piece.stage, piece.op, microbatch, slices[index])

    old = ticks.schedule
    programs = tuple(tuple(map(action, program)) for program in old.programs)
    schedule = Schedule(old.num_stages, old.num_microbatches // len(slices), programs)
    return replace(ticks, schedule=schedule)


class PastSlots(NamedTuple):
    """The slots of the state that slices of a microbatch carry, on the rank of a stage.

    Both are [stages * pieces], with the same slot for all slices of a microbatch, and -1 where
    there is none.

    Attributes:
        past: Slots of the state that slices write, from the first F of a microbatch to the last
            action that reads it.
        past_cotangents: Slots of its cotangent, from the first B or I of a microbatch to the last.
    """

    past: list[int]
    past_cotangents: list[int]


def assign_past_slots(ticks: Ticks, num_slices: int) -> PastSlots:
    """Returns the slots of carried states."""
    times = action_times(ticks)
    slots = PastSlots(*([-1] * len(times.forwards) for _ in PastSlots._fields))
    if num_slices == 1:
        return slots
    for program in ticks.schedule.programs:
        # The first slice of a microbatch stands for all.
        first = [
            action.stage * ticks.schedule.num_microbatches + action.microbatch
            for step in program
            for action in actions_of(step)
            if action.op is Op.F and action.microbatch % num_slices == 0
        ]
        lives: tuple[list[Lifetime], list[Lifetime]] = ([], [])
        for action_id in first:
            pieces = slice(action_id, action_id + num_slices)
            backwards = times.backwards[pieces]
            ends = (*times.forwards[pieces], *backwards, *times.weights[pieces])
            lives[0].append(Lifetime(times.forwards[action_id], max(ends), action_id))
            if min(backwards) >= 0:
                lives[1].append(Lifetime(min(backwards), max(backwards), action_id))
        for slots_of_buffer, lives_of_buffer in zip(slots, lives, strict=True):
            for action_id, slot in allocate(lives_of_buffer):
                slots_of_buffer[action_id : action_id + num_slices] = [slot] * num_slices
    return slots
