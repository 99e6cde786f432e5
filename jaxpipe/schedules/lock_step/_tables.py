"""Ticks as integers: what a loop over ticks looks up to know what each rank does.

A table is [num_ticks][num_ranks]; -1 stands for nothing.
"""

from collections.abc import Iterator
from typing import NamedTuple

from .._action import Action, Op, actions_of
from .._schedule import Schedule, num_ranks, stages_of_rank
from ..builders._require import require
from ._slots import HAND_OVER, Slots, count, slots_of
from ._ticks import PHASE, Ticks, num_ticks, ticked
from ._weight_prefetch import Visit, is_side_by_side, visits

Table = tuple[tuple[int, ...], ...]


class Work(NamedTuple):
    """One phase of every tick: F, then B or I, then W.

    Attributes:
        microbatch: -1 if the rank has nothing to do in this phase.
        stage: Of the model.
        chunk: Which of the rank's stages that is.
        input: Slot of the input of F; -1 for stage 0, which reads the batch.
        cotangent: Slot of the cotangent of B or I. In F: where the last stage leaves it.
        for_backward: Slot of what F leaves for B or I.
        for_weight: Slot of what F leaves for W.
        link: Slot of what I leaves for W; -1 in a B, which leaves nothing.
        source: Where the weights are (`_visits`).
        following: Which of the rank's stages to gather ahead, or -1.
        closes: 1 after the last backward of a visit.
    """

    microbatch: Table
    stage: Table
    chunk: Table
    input: Table
    cotangent: Table
    for_backward: Table
    for_weight: Table
    link: Table
    source: Table
    following: Table
    closes: Table


class Tables(NamedTuple):
    """A grid of ticks as tables.

    Attributes:
        forward: F.
        backward: B and I.
        weight: W.
        activations: By how many ranks around the ring activations are handed on, the slots they
            arrive in; 0 is from a rank's stage to its own next one.
        cotangents: The same for cotangents.
        num_slots: Sizes of the buffers.
        first: For every rank, which of its stages it begins with.
        side_by_side: Whether forward and backward hold weights of their own (`_visits`).
    """

    forward: Work
    backward: Work
    weight: Work
    activations: dict[int, Table]
    cotangents: dict[int, Table]
    num_slots: dict[str, int]
    first: tuple[int, ...]
    side_by_side: bool


class Home(NamedTuple):
    """Where a stage lies."""

    rank: int
    chunk: int


def homes(schedule: Schedule) -> dict[int, Home]:
    """The rank of every stage, and which of that rank's it is, in forward order.

    Raises:
        ValueError: If ranks hold different numbers of stages.
    """
    held = [stages_of_rank(schedule, rank) for rank in range(num_ranks(schedule))]
    counts = [len(stages) for stages in held]
    require(
        len(set(counts)) == 1,
        f"Ranks hold {', '.join(map(str, counts))} stages, and all run one program.",
        "Give a schedule with as many on every rank.",
    )
    return {
        stage: Home(rank, chunk)
        for rank, stages in enumerate(held)
        for chunk, stage in enumerate(stages)
    }


_FIELDS = {
    Op.F: ("input", "for_backward", "for_weight"),
    Op.B: ("cotangent", "for_backward", "for_weight"),
    Op.I: ("cotangent", "for_backward", "for_weight", "link"),
    Op.W: ("for_weight", "link"),
}
"""The slots that an action reads or writes, beside the last stage's F."""

_Draft = list[list[int]]


def tables(ticks: Ticks) -> Tables:
    """The tables of a grid that passes `check_ticks`.

    Raises:
        ValueError: If ranks hold different numbers of stages.
    """
    schedule, slots = ticks.schedule, slots_of(ticks)
    places = homes(schedule)
    visiting: list[list[Action]] = [[] for _ in schedule.programs]
    for rank, _, action in ticked(ticks):
        if action.op is not Op.W:
            visiting[rank].append(action)
    side_by_side = is_side_by_side(visiting)
    upcoming = (v for program in visiting for v in visits(program, side_by_side=side_by_side))
    forward, backward, weight = _phases(ticks, places, slots, upcoming)
    sizes = {name: count(buffer) for name, buffer in slots._asdict().items()}
    first = tuple(places[actions_of(program[0])[0].stage].chunk for program in schedule.programs)
    return Tables(
        forward,
        backward,
        weight,
        _arrivals(ticks, places, (Op.F,), 1, slots.inputs),
        _arrivals(ticks, places, (Op.B, Op.I), -1, slots.cotangents),
        sizes,
        first,
        side_by_side,
    )


def _phases(
    ticks: Ticks, places: dict[int, Home], slots: Slots, upcoming: Iterator[Visit]
) -> Iterator[Work]:
    """The phases of a tick. `upcoming` has the visits of every F, B and I, rank by rank."""
    schedule = ticks.schedule
    buffers = {
        "input": slots.inputs,
        "cotangent": slots.cotangents,
        "for_backward": slots.for_backward,
        "for_weight": slots.for_weight,
        "link": slots.links,
    }
    size = num_ticks(ticks), num_ranks(schedule)
    phases = [{name: _empty(*size) for name in Work._fields} for _ in range(HAND_OVER)]
    for rank, tick, action in ticked(ticks):
        stage, op, microbatch = action.stage, action.op, action.microbatch
        phase = phases[PHASE[op]]
        phase["microbatch"][tick][rank] = microbatch
        phase["stage"][tick][rank] = stage
        phase["chunk"][tick][rank] = places[stage].chunk
        number = stage * schedule.num_microbatches + microbatch
        for name in _FIELDS[op]:
            phase[name][tick][rank] = buffers[name][number]
        if op is Op.F and stage == schedule.num_stages - 1:
            phase["cotangent"][tick][rank] = slots.cotangents[number]
        if op is not Op.W:
            source, following, closes = next(upcoming)
            phase["source"][tick][rank] = source
            phase["following"][tick][rank] = places[following].chunk if following >= 0 else -1
            phase["closes"][tick][rank] = int(closes)
    # Each draft is given up for its table: all of both would be twice the memory.
    return (Work(*(_frozen(phase.pop(name)) for name in Work._fields)) for phase in phases)


def _arrivals(
    ticks: Ticks, places: dict[int, Home], ops: tuple[Op, ...], step: int, slots: list[int]
) -> dict[int, Table]:
    """The slots that results of `ops` arrive in, `step` stages further, by offset of ranks."""
    schedule = ticks.schedule
    drafts: dict[int, _Draft] = {}
    for rank, tick, action in ticked(ticks):
        target = action.stage + step
        if action.op in ops and target in places:
            home = places[target].rank
            offset = (home - rank) % num_ranks(schedule)
            if offset not in drafts:
                drafts[offset] = _empty(num_ticks(ticks), num_ranks(schedule))
            slot = slots[target * schedule.num_microbatches + action.microbatch]
            drafts[offset][tick][home] = slot
    return {offset: _frozen(draft) for offset, draft in sorted(drafts.items())}


def _empty(num_ticks: int, num_ranks: int) -> _Draft:
    return [[-1] * num_ranks for _ in range(num_ticks)]


def _frozen(draft: _Draft) -> Table:
    return tuple(map(tuple, draft))
