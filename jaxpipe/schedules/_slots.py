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

from ._action import Action, Op
from ._ticks import PHASE, Ticks, ticked

HAND_OVER = 3
_PHASES = 4

Place = tuple[int, int]
"""A (stage, microbatch)."""


class Slots(NamedTuple):
    """For each buffer the slot of every (stage, microbatch) that has one, on its own rank.

    Attributes:
        inputs: Of F; none for stage 0, which reads the batch.
        cotangents: Of B and I.
        for_backward: From F to B or I.
        for_weight: From F to W, or to B where the backward is whole.
        links: From I to W.
    """

    inputs: dict[Place, int]
    cotangents: dict[Place, int]
    for_backward: dict[Place, int]
    for_weight: dict[Place, int]
    links: dict[Place, int]


def slots_of(ticks: Ticks) -> Slots:
    """The slots of a grid that passes `check_ticks`."""
    at = {action: tick * _PHASES + PHASE[action.op] for _, tick, action in ticked(ticks)}
    ranks = {action: rank for rank, _, action in ticked(ticks)}
    names = Slots._fields
    lives: dict[str, dict[int, list[_Life]]] = {name: {} for name in names}
    for forward, rank in ranks.items():
        if forward.op is Op.F:
            for name, life in _lives(forward, at, ticks.schedule.num_stages):
                lives[name].setdefault(rank, []).append(life)
    return Slots(*(_allocate_all(lives[name]) for name in names))


def count(slots: dict[Place, int]) -> int:
    """How many slots a buffer has: what the fullest rank needs, as all ranks run one program."""
    return 1 + max(slots.values(), default=-1)


class _Life(NamedTuple):
    """When something comes into being, when it is last read, and what it is of."""

    start: int
    end: int
    place: Place


def _lives(f: Action, at: dict[Action, int], num_stages: int) -> Iterator[tuple[str, _Life]]:
    """What the F of a stage and microbatch, and all that follows from it, leave lying."""
    place = stage, microbatch = f.stage, f.microbatch
    whole, i, w = (Action(stage, op, microbatch) for op in (Op.B, Op.I, Op.W))
    backward, weight = (whole, whole) if whole in at else (i, w)
    if stage > 0:
        yield "inputs", _Life(_handed_over(at, stage - 1, microbatch, (Op.F,)), at[f], place)
    if backward not in at:
        return
    if stage < num_stages - 1:
        arrival = _handed_over(at, stage + 1, microbatch, (Op.B, Op.I))
    else:
        arrival = at[f]  # the loss follows its F at once
    yield "cotangents", _Life(arrival, at[backward], place)
    yield "for_backward", _Life(at[f], at[backward], place)
    yield "for_weight", _Life(at[f], at[weight], place)
    if weight is not backward:
        yield "links", _Life(at[i], at[w], place)


def _handed_over(at: dict[Action, int], stage: int, microbatch: int, ops: tuple[Op, ...]) -> int:
    """The hand-over of the tick in which one of `ops` ran."""
    time = next(at[a] for op in ops if (a := Action(stage, op, microbatch)) in at)
    return time // _PHASES * _PHASES + HAND_OVER


def _allocate_all(lives: dict[int, list[_Life]]) -> dict[Place, int]:
    return {place: slot for rank in lives for place, slot in _allocate(lives[rank])}


def _allocate(lives: list[_Life]) -> Iterator[tuple[Place, int]]:
    """First come, lowest free slot: as many slots as lives overlap at most, and no more."""
    taken: list[tuple[int, int]] = []
    free: list[int] = []
    for life in sorted(lives):
        while taken and taken[0][0] < life.start:
            heappush(free, heappop(taken)[1])
        slot = heappop(free) if free else len(taken)
        heappush(taken, (life.end, slot))
        yield life.place, slot
