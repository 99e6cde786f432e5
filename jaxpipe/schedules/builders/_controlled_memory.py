"""V-Half and V-Min: a V with two chunks, whose spacing decides how much memory it takes.

p ranks, m microbatches. A *building block* says when each rank runs the four passes of microbatch 0
(F0, F1, I1, I0: chunk 0 forward to chunk 0 backward, the way of a microbatch through the V), in
slots of one pass each. The block repeats every 6 slots: four passes and two W's. The spread of a
block is what it holds alive. As drawn it wastes slots at both ends, so three things follow: passes
of the warmup and the drain move earlier while no rank's peak rises, W's take the slots that are
free, and at last only the order is kept.
"""

from bisect import bisect_left, insort
from collections import deque
from math import isqrt

from ..language._action import Action, Op
from ..language._placement import v_stage
from ..language._schedule import Schedule
from ._require import require, require_positive

_PERIOD = 6
_F0, _F1, _I1, _I0, _W = range(5)

# A rank's slots: slots[kind, microbatch] is when it runs; no two are equal.
Slots = dict[tuple[int, int], int]


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """V-Half: holds about half the activations of 1F1B, with a bubble smaller than 1F1B's.

    References:
        Qi et al., 2024, arXiv 2405.15362, section 3.
    """
    require_positive(num_ranks=num_ranks, num_microbatches=num_microbatches)
    p, gap = num_ranks, 3 if num_ranks % 2 == 0 else 0
    blocks = [
        (2 * r, 3 * p - r - 2, 3 * p + gap + 2 * r - 1, 6 * p + gap - r - 2) for r in range(p)
    ]
    return _from_blocks(blocks, num_microbatches)


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """V-Min: holds about a third of the activations of 1F1B, the least that a V can.

    Its ranks run in lock-step: with unequal costs the bubble grows with the microbatches.

    References:
        Qi et al., 2024, arXiv 2405.15362, section 3.
    """
    require_positive(num_ranks=num_ranks, num_microbatches=num_microbatches)
    p, gap = num_ranks, 2 if num_ranks % 3 == 0 else 0
    blocks = [(r, 2 * p - r - 1, 2 * p + gap + r, 4 * p + gap - r - 1) for r in range(p)]
    return _from_blocks(blocks, num_microbatches)


_MAX_WORK = 1 << 24


def _from_blocks(blocks: list[tuple[int, int, int, int]], num_microbatches: int) -> Schedule:
    require(
        len(blocks) ** 2 * num_microbatches <= _MAX_WORK,
        f"`num_ranks` is {len(blocks)} for {num_microbatches} microbatches, and the time to build "
        "this schedule grows with its square.",
        f"Give at most {isqrt(_MAX_WORK // num_microbatches)}.",
    )
    ranks = [
        {
            (kind, m): start + _PERIOD * m
            for kind, start in enumerate(block)
            for m in range(num_microbatches)
        }
        for block in blocks
    ]
    # First with W's in their slots, at both ends; then without them, at the end they have blocked.
    ranks = _squeeze(_move_earlier([_with_weights(slots) for slots in ranks], warmup=True))
    ranks = _move_earlier([_without_weights(slots) for slots in ranks], warmup=False)
    ranks = _squeeze([_with_weights(slots) for slots in ranks])
    programs = tuple(
        _program(rank, len(ranks), _without_weights(slots)) for rank, slots in enumerate(ranks)
    )
    return Schedule(2 * len(ranks), num_microbatches, programs)


def _without_weights(slots: Slots) -> Slots:
    return {key: slot for key, slot in slots.items() if key[0] != _W}


def _with_weights(slots: Slots) -> Slots:
    """Puts a W into every free slot that has an I without one before it; the rest at the end."""
    taken = {slot: kind for (kind, _), slot in slots.items()}
    filled, waiting, done, slot, last = dict(slots), 0, 0, 0, max(taken)
    while slot <= last or waiting:
        if slot in taken:
            waiting += taken[slot] in (_I1, _I0)
        elif waiting:
            filled[_W, done] = slot
            waiting, done = waiting - 1, done + 1
        slot += 1
    return filled


class _Memory:
    """Counts what a rank holds after every slot, while passes of it move to earlier slots.

    Where no W is placed yet, each free slot runs one of those that wait.

    Attributes:
        kinds: [slots] The pass of each slot; None in free ones.
        held: [slots] After each, how many chunk-microbatches are alive, and how many W's wait.
    """

    def __init__(self, slots: Slots):
        self.kinds: list[int | None] = [None] * (1 + max(slots.values()))
        for (kind, _), slot in slots.items():
            self.kinds[slot] = kind
        self._implied = _W not in self.kinds
        self.held = [(0, 0)] * len(self.kinds)
        for slot in range(len(self.kinds)):
            self.held[slot] = self._after(slot, self.held[slot - 1])

    def _after(self, slot: int, held: tuple[int, int]) -> tuple[int, int]:
        kind, (alive, waiting) = self.kinds[slot], held
        if kind in (_F0, _F1):
            return alive + 1, waiting
        if kind in (_I1, _I0):
            return alive, waiting + 1
        if kind == _W or (self._implied and waiting):
            return alive - 1, waiting - 1
        return held

    def peak(self) -> int:
        return max(alive for alive, _ in self.held)

    def move(self, slot: int, earlier: int, cap: int) -> bool:
        """Moves a pass to a free slot, unless the rank would hold more than `cap` then.

        Only the slots from `earlier` on are counted anew, until they hold what they did before.
        """
        self.kinds[earlier], self.kinds[slot] = self.kinds[slot], None
        held, changed = self.held[earlier - 1] if earlier else (0, 0), []
        for position in range(earlier, len(self.kinds)):
            held = self._after(position, held)
            if held[0] > cap:
                self.kinds[slot], self.kinds[earlier] = self.kinds[earlier], None
                return False
            if position >= slot and held == self.held[position]:
                break
            changed.append(held)
        self.held[earlier : earlier + len(changed)] = changed
        return True


def _in_time_order(ranks: list[Slots]) -> list[tuple[int, int, int, int]]:
    """Returns the (slot, rank, kind, microbatch) of every pass, in the order of time."""
    return sorted(
        (slot, rank, kind, m)
        for rank, slots in enumerate(ranks)
        for (kind, m), slot in slots.items()
    )


def _ready(ranks: list[Slots], rank: int, kind: int, m: int) -> int:
    """Returns the first slot after all dependencies of a pass; of a W, without its I."""
    slots = ranks[rank]
    waits = [slots[kind, m - 1]] if m else []
    if _F0 < kind < _W:
        waits.append(slots[kind - 1, m])
    neighbour = {_F0: rank - 1, _I1: rank - 1, _F1: rank + 1, _I0: rank + 1}.get(kind, -1)
    if 0 <= neighbour < len(ranks):
        waits.append(ranks[neighbour][kind, m])
    return 1 + max(waits, default=-1)


def _move_earlier(ranks: list[Slots], *, warmup: bool) -> list[Slots]:
    """Moves each pass outside the steady state to the first free slot that costs no memory.

    The steady state lasts from rank 0's first I0 to its last F0.
    """
    ranks = [dict(slots) for slots in ranks]
    memories = [_Memory(slots) for slots in ranks]
    cap = max(memory.peak() for memory in memories)
    steady_from = ranks[0][_I0, 0]
    steady_to = max(slot for (kind, _), slot in ranks[0].items() if kind == _F0)
    occupied: list[set[int]] = [set() for _ in ranks]
    # The slots of all I's of a rank, in order: W number m is that of the I at index m.
    inputs = [sorted(s for (k, _), s in slots.items() if k in (_I1, _I0)) for slots in ranks]
    for slot, rank, kind, m in _in_time_order(ranks):
        before = (slot, rank) < (steady_from, 0)
        after = (slot, rank) > (max(steady_to, steady_from), 0)
        if after or (before and warmup):
            ready = _ready(ranks, rank, kind, m)
            if kind == _W:
                ready = max(ready, 1 + inputs[rank][m])
            free = (s for s in range(ready, slot) if s not in occupied[rank])
            moved = next((s for s in free if memories[rank].move(slot, s, cap)), slot)
            ranks[rank][kind, m] = moved
            if kind in (_I1, _I0):
                del inputs[rank][bisect_left(inputs[rank], slot)]
                insort(inputs[rank], moved)
        occupied[rank].add(ranks[rank][kind, m])
    return ranks


def _squeeze(ranks: list[Slots]) -> list[Slots]:
    """Keeps the order and closes every gap that no dependency needs."""
    squeezed: list[Slots] = [{} for _ in ranks]
    ends = [0] * len(ranks)
    for _, rank, kind, m in _in_time_order(ranks):
        ready = 0 if kind == _W else _ready(squeezed, rank, kind, m)
        slot = max(ends[rank], ready)
        squeezed[rank][kind, m], ends[rank] = slot, slot + 1
    return squeezed


def _program(rank: int, num_ranks: int, slots: Slots) -> tuple[Action, ...]:
    """Returns the order of a rank. A free slot runs the oldest W of chunk 1, else of chunk 0."""
    stages = [v_stage(rank, chunk, num_ranks) for chunk in (0, 1)]
    passes = {slot: key for key, slot in slots.items()}
    waiting: dict[int, deque[int]] = {1: deque(), 0: deque()}
    program: list[Action] = []
    for slot in range(max(passes) + 1):
        if slot in passes:
            kind, m = passes[slot]
            chunk = int(kind in (_F1, _I1))
            program.append(Action(stages[chunk], Op.F if kind in (_F0, _F1) else Op.I, m))
            if kind in (_I1, _I0):
                waiting[chunk].append(m)
            continue
        for chunk, microbatches in waiting.items():
            if microbatches:
                program.append(Action(stages[chunk], Op.W, microbatches.popleft()))
                break
    program += [Action(stages[chunk], Op.W, m) for chunk, ms in waiting.items() for m in ms]
    return tuple(program)
