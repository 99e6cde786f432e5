"""Where everything lies between ticks: as few slots per buffer as ever hold something at one time.

Five things wait on a rank. An `input` waits for its F, a `cotangent` for its B or I. What F leaves
for B or I and what it leaves for W lie in buffers of their own, as they are freed at different
times; so does the `link`, what I leaves for W.

A slot is taken when its content comes into being and free when it has been read for the last time.
Within a tick time passes too: F, then B or I, then W, then the hand-over to other ranks.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from .._action import Op, actions_of
from ._ticks import PHASE, Ticks, enumerate_ticks

HAND_OVER = 3
_PHASES = 4


class Slots(NamedTuple):
    """For each buffer the slot of every microbatch on every stage, on the stage's own rank.

    All are [stages * M]: entry `stage * M + microbatch`, where M is the number of microbatches, and
    -1 where there is none.

    Attributes:
        inputs: Of F; none for stage 0, which reads the batch.
        cotangents: Of B and I.
        residuals_for_backward: From F to B or I.
        residuals_for_weight: From F to W, or to B where the backward is whole.
        wgrad_residuals: From I to W.
    """

    inputs: list[int]
    cotangents: list[int]
    residuals_for_backward: list[int]
    residuals_for_weight: list[int]
    wgrad_residuals: list[int]


def assign_slots(ticks: Ticks) -> Slots:
    """The slots of a grid that passes `check_ticks`."""
    num_microbatches = ticks.schedule.num_microbatches
    times = _times(ticks)
    slots = Slots(*([-1] * len(times.forwards) for _ in Slots._fields))
    for program in ticks.schedule.programs:
        lives: dict[str, list[_Life]] = {name: [] for name in Slots._fields}
        for action in (action for step in program for action in actions_of(step)):
            if action.op is Op.F:
                number = action.stage * num_microbatches + action.microbatch
                for name, life in _lives(number, times, num_microbatches):
                    lives[name].append(life)
        for of_buffer, in_buffer in zip(slots, lives.values(), strict=True):
            for number, slot in _allocate(in_buffer):
                of_buffer[number] = slot
    return slots


def num_slots(slots: list[int]) -> int:
    """How many slots a buffer has: what the fullest rank needs, as all ranks run one program."""
    return 1 + max(slots, default=-1)


class _Times(NamedTuple):
    """When F, then B or I, then B or W of every microbatch run on every stage, as in `Slots`."""

    forwards: list[int]
    backwards: list[int]
    weights: list[int]


def _times(ticks: Ticks) -> _Times:
    num_microbatches = ticks.schedule.num_microbatches
    size = ticks.schedule.num_stages * num_microbatches
    times = _Times([-1] * size, [-1] * size, [-1] * size)
    for _, tick, action in enumerate_ticks(ticks):
        number = action.stage * num_microbatches + action.microbatch
        time = tick * _PHASES + PHASE[action.op]
        if action.op is Op.F:
            times.forwards[number] = time
        if action.op in (Op.B, Op.I):
            times.backwards[number] = time
        if action.op in (Op.B, Op.W):
            times.weights[number] = time
    return times


class _Life(NamedTuple):
    """When something comes into being, when it is last read, and the entry it has in `Slots`."""

    start: int
    end: int
    number: int


def _lives(number: int, times: _Times, num_microbatches: int) -> Iterator[tuple[str, _Life]]:
    """What the F of a stage and microbatch, and all that follows from it, leave lying."""
    forward, backward, weight = (of_kind[number] for of_kind in times)
    if number >= num_microbatches:
        sent = times.forwards[number - num_microbatches]
        yield "inputs", _Life(_handed_over(sent), forward, number)
    if backward < 0:
        return
    if number + num_microbatches < len(times.backwards):
        arrival = _handed_over(times.backwards[number + num_microbatches])
    else:
        arrival = forward  # the loss follows its F at once
    yield "cotangents", _Life(arrival, backward, number)
    yield "residuals_for_backward", _Life(forward, backward, number)
    yield "residuals_for_weight", _Life(forward, weight, number)
    if weight != backward:
        yield "wgrad_residuals", _Life(backward, weight, number)


def _handed_over(time: int) -> int:
    """The hand-over of the tick of `time`."""
    return time // _PHASES * _PHASES + HAND_OVER


def _allocate(lives: list[_Life]) -> Iterator[tuple[int, int]]:
    """First come, lowest free slot: as many slots as lives overlap at most, and no more."""
    taken: list[tuple[int, int]] = []
    free: list[int] = []
    for life in sorted(lives):
        while taken and taken[0][0] < life.start:
            heappush(free, heappop(taken)[1])
        slot = heappop(free) if free else len(taken)
        heappush(taken, (life.end, slot))
        yield life.number, slot
