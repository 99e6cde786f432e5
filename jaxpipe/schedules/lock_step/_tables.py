"""Ticks as integers: the tables in which a loop over ticks looks up the work of each rank.

A table is [num_ticks][num_ranks]; -1 stands for no work, no slot or no chunk. Arrays that wait
between ticks are in slots of buffers, as few per buffer as can be.

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

from ..language._action import Action, Op, actions_of
from ..language._schedule import num_ranks, num_slices, rank_by_microbatch, stages_of_rank
from ._copies import WeightCopies, weight_copies
from ._ticks import PHASE, Ticks, enumerate_ticks, has_forwards_first, num_ticks, ticks_of_pieces
from ._weight_prefetch import ChunkResidency, chunk_residencies, separates_backward_weights

Table = tuple[tuple[int, ...], ...]


class PhaseTable(NamedTuple):
    """One phase of every tick: F, then B or I, then W.

    Attributes:
        microbatch: -1 if the rank has nothing to do in this phase.
        input_slot: Slot of the input of F; -1 for stage 0, which reads the batch.
        cotangent_slot: Slot of the cotangent of B or I. In F: the slot to which the last
            stage writes it.
        wgrad_residuals_slot: Slot of the residuals that I leaves for W; -1 in a B.
        weight_source: Where the weights are: a constant of `_weight_prefetch`.
        prefetch_chunk: The rank's chunk whose weights to prefetch, or -1.
        ends_residency: 1 in the last backward of a residency.
        completes_chunk: 1 in the B or W after which no other adds to the gradients of the chunk, 0
            in other actions.
        past_slot: Slot of the state that slices of the microbatch carry; -1 without slices.
    """

    microbatch: Table
    stage: Table
    chunk: Table
    input_slot: Table
    cotangent_slot: Table
    residuals_for_backward_slot: Table
    residuals_for_weight_slot: Table
    wgrad_residuals_slot: Table
    weight_source: Table
    prefetch_chunk: Table
    ends_residency: Table
    completes_chunk: Table
    past_slot: Table
    past_cotangent_slot: Table

    @property
    def is_idle(self) -> bool:
        """Returns whether no rank has work in this phase, in any tick."""
        return max(map(max, self.microbatch)) < 0


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


class TickTables(NamedTuple):
    """A grid of ticks as tables of F, of B and I, and of W.

    Attributes:
        activation_arrivals: By how many ranks around the ring activations are handed on, the slots
            they arrive in; 0 is from a rank's stage to its own next one.
        cotangent_arrivals: The same for cotangents.
        first_chunks: [num_ranks] the chunk with which each rank begins.
        separate_backward_weights: Whether forward and backward hold weights of their own
            (`_weight_prefetch`).
        copies: How a rank obtains the weights of its chunks; None if it stores all of them.
        num_slices: Slices of each sequence. Every slice counts as a microbatch in the tables.
        forwards_first: Whether all forwards run before all backwards.
        memory_cap: That of the grid.
        chunks: The chunks of a rank whose gradients are complete after these ticks; empty if no
            backward runs in them.
    """

    forward: PhaseTable
    backward: PhaseTable
    weight: PhaseTable
    activation_arrivals: dict[int, Table]
    cotangent_arrivals: dict[int, Table]
    num_slots: dict[str, int]
    first_chunks: tuple[int, ...]
    separate_backward_weights: bool
    copies: WeightCopies | None
    num_slices: int
    forwards_first: bool
    memory_cap: int | None
    chunks: range


_RESIDUALS = "residuals_for_backward_slot", "residuals_for_weight_slot"
_BACKWARD = "cotangent_slot", *_RESIDUALS, "past_slot", "past_cotangent_slot"
_FIELDS = {
    Op.F: ("input_slot", *_RESIDUALS, "past_slot"),
    Op.B: _BACKWARD,
    Op.I: (*_BACKWARD, "wgrad_residuals_slot"),
    Op.W: ("residuals_for_weight_slot", "wgrad_residuals_slot", "past_slot"),
}
"""The slots that an action reads or writes, except the cotangent that the last stage's F writes."""

HAND_OVER = 3

_PHASES = 4

_Draft = list[list[int]]


def buffer_slots(ticks: Ticks) -> dict[str, int]:
    """Returns the slots of every buffer of a grid: `TickTables.num_slots` without the tables."""
    slots = _assign_slots(ticks_of_pieces(ticks), num_slices(ticks.schedule))
    return _sizes(slots)


def _sizes(slots: Slots) -> dict[str, int]:
    """Returns the slots of every buffer: those of the fullest rank, as all run one program."""
    return {name: 1 + max(buffer, default=-1) for name, buffer in slots._asdict().items()}


def tick_tables(ticks: Ticks) -> TickTables:
    """Returns the tables of a grid."""
    slices = num_slices(ticks.schedule)
    ticks = ticks_of_pieces(ticks)
    slots = _assign_slots(ticks, slices)
    schedule = ticks.schedule
    copies = weight_copies(schedule)
    chunks = [
        {stage: chunk for chunk, stage in enumerate(stages_of_rank(schedule, rank))}
        for rank in range(num_ranks(schedule))
    ]
    visiting: list[list[Action]] = [[] for _ in schedule.programs]
    for rank, _, action in enumerate_ticks(ticks):
        if action.op is not Op.W:
            visiting[rank].append(action)
    separate = separates_backward_weights(visiting)
    upcoming = (
        v
        for program in visiting
        for v in chunk_residencies(program, separate_backward_weights=separate)
    )
    forward, backward, weight = _phases(ticks, chunks, slots, upcoming)
    sizes = _sizes(slots)
    first = tuple(
        chunk_of[actions_of(program[0])[0].stage]
        for chunk_of, program in zip(chunks, schedule.programs, strict=True)
    )
    return TickTables(
        forward=forward,
        backward=backward,
        weight=weight,
        activation_arrivals=_arrivals(ticks, (Op.F,), 1, slots.inputs),
        cotangent_arrivals=_arrivals(ticks, (Op.B, Op.I), -1, slots.cotangents),
        num_slots=sizes,
        first_chunks=first,
        separate_backward_weights=separate,
        copies=copies,
        num_slices=slices,
        forwards_first=has_forwards_first(ticks),
        memory_cap=ticks.memory_cap,
        chunks=range(max(map(len, chunks)) if sizes["cotangents"] else 0),
    )


def _phases(
    ticks: Ticks,
    chunks: list[dict[int, int]],
    slots: Slots,
    upcoming: Iterator[ChunkResidency],
) -> Iterator[PhaseTable]:
    """Yields the tables of F, of B and I, and of W.

    `upcoming` has the residency of every F, B and I, rank by rank.
    """
    schedule = ticks.schedule
    buffers = {
        "input_slot": slots.inputs,
        "cotangent_slot": slots.cotangents,
        "residuals_for_backward_slot": slots.residuals_for_backward,
        "residuals_for_weight_slot": slots.residuals_for_weight,
        "wgrad_residuals_slot": slots.wgrad_residuals,
        "past_slot": slots.past,
        "past_cotangent_slot": slots.past_cotangents,
    }
    size = num_ticks(ticks), num_ranks(schedule)
    phases = [{name: _empty(*size) for name in PhaseTable._fields} for _ in range(HAND_OVER)]
    last_additions: dict[tuple[int, int], list[int]] = {}
    for rank, tick, action in enumerate_ticks(ticks):
        stage, op, microbatch = action.stage, action.op, action.microbatch
        phase = phases[PHASE[op]]
        phase["microbatch"][tick][rank] = microbatch
        phase["stage"][tick][rank] = stage
        phase["chunk"][tick][rank] = chunks[rank][stage]
        number = stage * schedule.num_microbatches + microbatch
        for name in _FIELDS[op]:
            phase[name][tick][rank] = buffers[name][number]
        if op is Op.F and stage == schedule.num_stages - 1:
            phase["cotangent_slot"][tick][rank] = slots.cotangents[number]
        if op is not Op.W:
            source, following, ends_residency = next(upcoming)
            phase["weight_source"][tick][rank] = source
            phase["prefetch_chunk"][tick][rank] = chunks[rank][following] if following >= 0 else -1
            phase["ends_residency"][tick][rank] = int(ends_residency)
        phase["completes_chunk"][tick][rank] = 0
        if op in (Op.B, Op.W):
            last_additions[rank, stage] = phase["completes_chunk"][tick]
    for (rank, _), row in last_additions.items():
        row[rank] = 1
    # Each draft is freed for its table: keeping all of both would take twice the memory.
    return (
        PhaseTable(*(_frozen(phase.pop(name)) for name in PhaseTable._fields)) for phase in phases
    )


def _arrivals(ticks: Ticks, ops: tuple[Op, ...], step: int, slots: list[int]) -> dict[int, Table]:
    """Returns the slots in which outputs of `ops` arrive `step` stages on, by offset of ranks."""
    schedule = ticks.schedule
    rank_of = rank_by_microbatch(schedule)
    drafts: dict[int, _Draft] = {}
    for rank, tick, action in enumerate_ticks(ticks):
        target = action.stage + step
        if action.op in ops and (target, action.microbatch) in rank_of:
            home = rank_of[target, action.microbatch]
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


def _assign_slots(ticks: Ticks, num_slices: int) -> Slots:
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
