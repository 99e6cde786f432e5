"""The dependencies between actions, and an order in which all ranks together could run.

Whatever reads a whole schedule (checking, simulating, compiling) walks it in this order.
"""

from collections.abc import Iterator
from heapq import heappop, heappush

from ._action import Action, Op, ScheduleStep, actions_of
from ._schedule import Schedule, num_slices

_MAX_SHOWN_ACTIONS = 400
_MAX_SHOWN_RANKS = 16


class ScheduleError(ValueError):
    """Raised for a schedule that cannot run or would not compute the gradient."""


ResultKey = tuple[int, Op, int, int | None]
"""The output of an action: the fields of an `Action`, faster to make and to hash."""


def output_keys(action: Action) -> tuple[ResultKey, ...]:
    """Returns the outputs of an action, as tuples of fields."""
    stage, op, microbatch, slice_id = action.stage, action.op, action.microbatch, action.slice
    if op is not Op.B:
        return ((stage, op, microbatch, slice_id),)
    return (stage, Op.I, microbatch, slice_id), (stage, Op.W, microbatch, slice_id)


def dependency_keys(action: Action, num_stages: int, num_slices: int) -> list[ResultKey]:
    """Returns the outputs that an action waits for, as tuples of fields."""
    stage, op, microbatch, slice_id = action.stage, action.op, action.microbatch, action.slice
    if op is Op.W:
        return [(stage, Op.I, microbatch, slice_id)]
    if op is Op.F:
        keys = [(stage - 1, Op.F, microbatch, slice_id)] if stage > 0 else []
        if slice_id is not None and slice_id > 0:
            keys.append((stage, Op.F, microbatch, slice_id - 1))
        return keys
    keys = [(stage, Op.F, microbatch, slice_id)]
    if stage < num_stages - 1:
        keys.append((stage + 1, Op.I, microbatch, slice_id))
    if slice_id is not None and slice_id < num_slices - 1:
        keys.append((stage, Op.I, microbatch, slice_id + 1))
    return keys


def outputs(action: Action) -> tuple[Action, ...]:
    """Returns the outputs of an action that others may wait for.

    A full backward has two, those of its halves I and W.
    """
    return tuple(Action(*result) for result in output_keys(action))


def dependencies(action: Action, num_stages: int, num_slices: int) -> Iterator[Action]:
    """Returns the outputs that an action waits for.

    A forward needs the previous stage; a backward its own forward and the next stage; a W its I.
    With causal attention a slice's forward needs the slice before, its backward the slice after.
    """
    return (Action(*need) for need in dependency_keys(action, num_stages, num_slices))


def topological_order(schedule: Schedule) -> list[tuple[int, ScheduleStep]]:
    """Returns one order in which all programs together could run.

    Both halves of a pair start together, so a pair waits for the dependencies of both.
    """
    return [(rank, step) for rank, step, *_ in walk_topologically(schedule)]


def walk_topologically(
    schedule: Schedule,
) -> Iterator[tuple[int, ScheduleStep, list[ResultKey], list[ResultKey]]]:
    """Yields (rank, step, dependencies, outputs) in the order of `topological_order`.

    Ranks take turns, round after round, and run as far as they can. One that waits for a result has
    no turn until that result is computed.
    """
    slices = num_slices(schedule)
    positions = [0] * len(schedule.programs)
    done: set[ResultKey] = set()
    waiting: dict[ResultKey, list[int]] = {}
    turns = [(0, rank) for rank in range(len(schedule.programs))]  # a heap of (round, rank)
    while turns:
        this_round, rank = heappop(turns)
        program = schedule.programs[rank]
        while positions[rank] < len(program):
            step = program[positions[rank]]
            waits = _step_dependencies(step, schedule.num_stages, slices)
            if not done.issuperset(waits):
                missing = next(need for need in waits if need not in done)
                waiting.setdefault(missing, []).append(rank)
                break
            outputs = [result for action in actions_of(step) for result in output_keys(action)]
            done.update(outputs)
            for result in outputs:
                for other in waiting.pop(result, ()):
                    heappush(turns, (this_round + (other < rank), other))
            positions[rank] += 1
            yield rank, step, waits, outputs
    if waiting:
        stuck = {rank: Action(*need) for need, ranks in waiting.items() for rank in ranks}
        waits_of = {rank: stuck[rank] for rank in sorted(stuck)}
        raise ScheduleError(_deadlock(schedule, positions, waits_of))


def _step_dependencies(step: ScheduleStep, num_stages: int, num_slices: int) -> list[ResultKey]:
    return [
        need
        for action in actions_of(step)
        for need in dependency_keys(action, num_stages, num_slices)
    ]


def _deadlock(schedule: Schedule, positions: list[int], waits: dict[int, Action]) -> str:
    """Returns the message: which rank waits where for what, and the marked text."""
    producer = {
        result: (rank, action)
        for rank, program in enumerate(schedule.programs)
        for step in program
        for action in actions_of(step)
        for result in outputs(action)
    }
    culprit = _culprit(waits, {result: rank for result, (rank, _) in producer.items()})
    lines = []
    for rank, need in waits.items():
        line = f"rank {rank} waits at {schedule.programs[rank][positions[rank]]} for "
        if need in producer:
            home, action = producer[need]
            lines.append(f"{line}{action}, which rank {home} has not reached")
        else:
            lines.append(f"{line}{need}, which no rank runs")
    return "\n".join(
        [
            "The schedule deadlocks:",
            *(f"  {line}" for line in lines[:_MAX_SHOWN_RANKS]),
            *(["  ..."] if len(lines) > _MAX_SHOWN_RANKS else []),
            "Move the marked action behind what it waits for, or that before it:",
            text_with_marker(schedule, culprit, positions[culprit]),
        ]
    )


def _culprit(waits: dict[int, Action], producer: dict[Action, int]) -> int:
    """Returns a rank that causes the deadlock.

    That is a rank which waits for an action that no rank runs, or for itself, or in a circle.
    """
    for rank, need in waits.items():
        if need not in producer or producer[need] == rank:
            return rank
    rank, seen = min(waits), set[int]()
    while rank not in seen:
        seen.add(rank)
        rank = producer[waits[rank]]
    return rank


def text_with_marker(schedule: Schedule, rank: int, position: int) -> str:
    """Returns the text of a schedule, one line per rank, with `<- here` behind one action.

    For a large schedule, returns only the part around that action.
    """
    is_large = sum(map(len, schedule.programs)) > _MAX_SHOWN_ACTIONS
    first, end = (max(0, position - 8), position + 8) if is_large else (0, None)
    lines = []
    for row, program in enumerate(schedule.programs):
        if is_large and abs(row - rank) > 4:
            continue
        words = [str(step) for step in program[first:end]]
        if row == rank:
            words.insert(position + 1 - first, "<- here")
        words = [*(["..."] if first else []), *words, *(["..."] if end else [])]
        lines.append(f"  {f'rank {row}: ' if is_large else ''}{' '.join(words)}")
    return "\n".join(lines)
