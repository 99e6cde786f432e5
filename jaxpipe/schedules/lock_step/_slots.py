"""Assigns buffer slots to the arrays that wait between ticks, as few per buffer as can be.

Seven kinds of arrays wait on a rank. An input waits for its F, a cotangent for its B or I. The
residuals of F that B or I reads and those that W reads are in separate buffers, as they are freed
at different times; so are the residuals that I leaves for W. Slices of a microbatch carry a state
from one to the next, and its cotangent back: both have the same slot for all of them.

A slot is taken when its array is made and freed when it has been read for the last time. A tick has
four phases: F, then B or I, then W, then the hand-over to other ranks.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from ..language._action import Op, actions_of
from ._ticks import PHASE, Ticks, enumerate_ticks

HAND_OVER = 3
_PHASES = 4


class Slots(NamedTuple):
    """For each buffer the slot of every microbatch on every stage, on its rank.

    All are [stages * M]: entry `stage * M + microbatch`, where M is the number of microbatches, and
    -1 where there is none.

    Attributes:
        inputs: Slots of the inputs of F; none for stage 0, which reads the batch.
        cotangents: Slots of the cotangents that B and I read.
        residuals_for_backward: Slots from F to B or I.
        residuals_for_weight: Slots from F to W, or to B where the backward is whole.
        wgrad_residuals: Slots of residuals from I to W.
        past: Slots of the state that slices write, from the first F of a microbatch to the last
            action that reads it.
        past_cotangents: Slots of its cotangent, from the first B or I of a microbatch to the last.
    """

    inputs: list[int]
    cotangents: list[int]
    residuals_for_backward: list[int]
    residuals_for_weight: list[int]
    wgrad_residuals: list[int]
    past: list[int]
    past_cotangents: list[int]


def assign_slots(ticks: Ticks, num_slices: int) -> Slots:
    """Returns the slots of a grid that passes `check_ticks`, whose slices are microbatches."""
    num_microbatches = ticks.schedule.num_microbatches
    times = _action_times(ticks)
    slots = Slots(*([-1] * len(times.forwards) for _ in Slots._fields))
    for program in ticks.schedule.programs:
        lives: dict[str, list[_Lifetime]] = {name: [] for name in Slots._fields}
        for action in (action for step in program for action in actions_of(step)):
            if action.op is Op.F:
                action_id = action.stage * num_microbatches + action.microbatch
                for name, life in _lives(action_id, times, num_microbatches):
                    lives[name].append(life)
                if num_slices > 1 and action.microbatch % num_slices == 0:
                    for name, life in _lives_of_state(action_id, times, num_slices):
                        lives[name].append(life)
        for slots_of_buffer, (name, lives_of_buffer) in zip(slots, lives.items(), strict=True):
            count = num_slices if name in ("past", "past_cotangents") else 1
            for action_id, slot in _allocate(lives_of_buffer):
                slots_of_buffer[action_id : action_id + count] = [slot] * count
    return slots


class _ActionTimes(NamedTuple):
    """The times of F, of B or I, and of B or W, of every stage and microbatch, as in `Slots`."""

    forwards: list[int]
    backwards: list[int]
    weights: list[int]


def _action_times(ticks: Ticks) -> _ActionTimes:
    """Returns the times of all actions of a grid, in phases from its start; -1 for none."""
    num_microbatches = ticks.schedule.num_microbatches
    size = ticks.schedule.num_stages * num_microbatches
    times = _ActionTimes([-1] * size, [-1] * size, [-1] * size)
    for _, tick, action in enumerate_ticks(ticks):
        action_id = action.stage * num_microbatches + action.microbatch
        time = tick * _PHASES + PHASE[action.op]
        if action.op is Op.F:
            times.forwards[action_id] = time
        if action.op in (Op.B, Op.I):
            times.backwards[action_id] = time
        if action.op in (Op.B, Op.W):
            times.weights[action_id] = time
    return times


class _Lifetime(NamedTuple):
    """The times when an array is made and last read, and its index in `Slots`."""

    start: int
    end: int
    action_id: int


def _lives(
    action_id: int, times: _ActionTimes, num_microbatches: int
) -> Iterator[tuple[str, _Lifetime]]:
    """Yields the lifetimes of all that follows from the F of a stage and microbatch, by buffer."""
    forward, backward, weight = (times_of_phase[action_id] for times_of_phase in times)
    if action_id >= num_microbatches:
        sent = times.forwards[action_id - num_microbatches]
        yield "inputs", _Lifetime(_handed_over(sent), forward, action_id)
    if backward < 0:
        return
    if action_id + num_microbatches < len(times.backwards):
        arrival = _handed_over(times.backwards[action_id + num_microbatches])
    else:
        arrival = forward  # the loss follows its F at once
    yield "cotangents", _Lifetime(arrival, backward, action_id)
    yield "residuals_for_backward", _Lifetime(forward, backward, action_id)
    yield "residuals_for_weight", _Lifetime(forward, weight, action_id)
    if weight != backward:
        yield "wgrad_residuals", _Lifetime(backward, weight, action_id)


def _lives_of_state(
    action_id: int, times: _ActionTimes, num_slices: int
) -> Iterator[tuple[str, _Lifetime]]:
    """Yields the lifetimes of the state, and of its cotangent, that begin with a first slice."""
    pieces = slice(action_id, action_id + num_slices)
    forwards, backwards, weights = (times_of_phase[pieces] for times_of_phase in times)
    yield "past", _Lifetime(forwards[0], max(*forwards, *backwards, *weights), action_id)
    if min(backwards) >= 0:
        yield "past_cotangents", _Lifetime(min(backwards), max(backwards), action_id)


def _handed_over(time: int) -> int:
    """Returns the time of the hand-over in the tick of `time`."""
    return time // _PHASES * _PHASES + HAND_OVER


def _allocate(lives: list[_Lifetime]) -> Iterator[tuple[int, int]]:
    """Yields (action id, slot): first come, lowest free slot, as few as lives overlap at most."""
    taken: list[tuple[int, int]] = []
    free: list[int] = []
    for life in sorted(lives):
        while taken and taken[0][0] < life.start:
            heappush(free, heappop(taken)[1])
        slot = heappop(free) if free else len(taken)
        heappush(taken, (life.end, slot))
        yield life.action_id, slot
