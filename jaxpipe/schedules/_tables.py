"""Ticks as integers: what a loop over ticks looks up to know what each rank does.

A table is [num_ticks][num_ranks]; -1 stands for nothing.
"""

from typing import NamedTuple

from ._action import Action, Op, actions_of
from ._require import require
from ._schedule import Schedule, num_ranks, stages_of_rank
from ._slots import HAND_OVER, Slots, count, slots_of
from ._ticks import PHASE, Ticks, num_ticks, ticked
from ._visits import Visit, visits

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
    places, of_visits = homes(schedule), visits(ticks)
    phases = [{name: _empty(ticks) for name in Work._fields} for _ in range(HAND_OVER)]
    hand_overs: tuple[dict[int, _Draft], dict[int, _Draft]] = {}, {}
    for rank, tick, action in ticked(ticks):
        entries = _entries(action, places, slots, schedule.num_stages)
        if action in of_visits.of:
            entries |= _visit_entries(of_visits.of[action], places)
        for name, value in entries.items():
            phases[PHASE[action.op]][name][tick][rank] = value
        forward, step = (action.op is Op.F), (1 if action.op is Op.F else -1)
        target = action.stage + step
        if action.op is Op.W or target not in places:
            continue
        home = places[target].rank
        arrivals = hand_overs[not forward].setdefault(
            (home - rank) % num_ranks(schedule), _empty(ticks)
        )
        waiting = slots.inputs if forward else slots.cotangents
        arrivals[tick][home] = waiting[target, action.microbatch]
    forward, backward, weight = (
        Work(**{name: _frozen(draft) for name, draft in phase.items()}) for phase in phases
    )
    activations, cotangents = (
        {offset: _frozen(draft) for offset, draft in sorted(drafts.items())}
        for drafts in hand_overs
    )
    sizes = {name: count(buffer) for name, buffer in slots._asdict().items()}
    first = tuple(places[actions_of(program[0])[0].stage].chunk for program in schedule.programs)
    return Tables(
        forward,
        backward,
        weight,
        activations,
        cotangents,
        sizes,
        first,
        of_visits.side_by_side,
    )


def _visit_entries(visit: Visit, places: dict[int, Home]) -> dict[str, int]:
    following = places[visit.following].chunk if visit.following >= 0 else -1
    return {"source": visit.source, "following": following, "closes": int(visit.closes)}


def _entries(
    action: Action, places: dict[int, Home], slots: Slots, num_stages: int
) -> dict[str, int]:
    place = action.stage, action.microbatch
    buffers = {
        "input": slots.inputs,
        "cotangent": slots.cotangents,
        "for_backward": slots.for_backward,
        "for_weight": slots.for_weight,
        "link": slots.links,
    }
    names = _FIELDS[action.op]
    if action.op is Op.F and action.stage == num_stages - 1:
        names = (*names, "cotangent")
    found = {name: buffers[name].get(place, -1) for name in names}
    return found | {
        "microbatch": action.microbatch,
        "stage": action.stage,
        "chunk": places[action.stage].chunk,
    }


def _empty(ticks: Ticks) -> _Draft:
    return [[-1] * len(ticks.numbers) for _ in range(num_ticks(ticks))]


def _frozen(draft: _Draft) -> Table:
    return tuple(map(tuple, draft))
