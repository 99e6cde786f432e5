"""The loops in which the ticks of a schedule run; those of most schedules run in one.

If all forwards run before all backwards, each kind has a loop of its own, with one phase to a tick.
Both may be cut in two, where backwards change to the earlier half of a rank's chunks: what forwards
of the later half have stored is then freed before there are gradients of the earlier half.
"""

from collections.abc import Iterator

from ._tables import PhaseTable, Table, TickTables

RankAction = tuple[int, int, int]
"""Rank, stage and microbatch of an F, or of its B."""


def middle_chunk(num_chunks: int) -> int:
    """Returns the first chunk of the later half; 0 if nothing is cut in two.

    That is so below 8 chunks: what is saved is then not worth the time to compile more loops.
    """
    return num_chunks // 2 if num_chunks >= 8 else 0


def tick_loops(tables: TickTables, *, in_halves: bool) -> tuple[TickTables, ...]:
    """Returns the tables of the loops that run one after the other: one, two or four.

    Every loop of forwards has buffers of residuals of its own, and those of the last one are read
    first. `chunks` of a loop are the chunks whose gradients it completes.

    Args:
        tables: The tables of all ticks.
        in_halves: Whether a rank completes the gradients of its chunks one after the other, so that
            loops may be cut in two. They are not if both sets of buffers exceed the memory cap of
            the grid.

    Returns:
        One loop of all ticks; or one of forwards and one of backwards; or of each the first and the
        second.

    Example:
        >>> from jaxpipe.schedules import build
        >>> from jaxpipe.schedules.lock_step import tick_tables, to_lock_step
        >>> ticks = to_lock_step(build("looped_bfs", ranks=2, microbatches=4, chunks=8))
        >>> loops = tick_loops(tick_tables(ticks), in_halves=True)
        >>> [len(loop.forward.microbatch) for loop in loops]
        [16, 17, 17, 16]
        >>> [[*loop.chunks] for loop in loops]
        [[], [], [4, 5, 6, 7], [0, 1, 2, 3]]
    """
    if not tables.forwards_first:
        return (tables,)
    forward_ticks = range(_working_ticks(tables.forward)[-1] + 1)
    backward_ticks = range(_working_ticks(tables.backward)[0], len(tables.forward.microbatch))
    cut = _cut(tables) if in_halves else None
    if cut is None:
        return (
            _forward_loop(tables, forward_ticks),
            _backward_loop(tables, backward_ticks, tables.chunks),
        )
    forward_cut, backward_cut, middle = cut
    by_half, (earlier, later) = _with_slots_by_half(tables, forward_cut)
    if tables.memory_cap is not None and earlier + later > tables.memory_cap:
        return tick_loops(tables, in_halves=False)
    backward_cut -= backward_ticks.start
    return (
        _with_residual_slots(_forward_loop(by_half, forward_ticks[:forward_cut]), earlier),
        _with_residual_slots(_forward_loop(by_half, forward_ticks[forward_cut:]), later),
        _backward_loop(by_half, backward_ticks[:backward_cut], tables.chunks[middle:]),
        _backward_loop(by_half, backward_ticks[backward_cut:], tables.chunks[:middle]),
    )


def _working_ticks(phase: PhaseTable) -> list[int]:
    return [tick for tick, row in enumerate(phase.microbatch) if max(row) >= 0]


def _forward_loop(tables: TickTables, ticks: range) -> TickTables:
    """Returns the forwards of a range of ticks, and the activations that are handed over."""
    return tables._replace(
        forward=_rows(tables.forward, ticks),
        backward=_idle(tables.backward, ticks),
        weight=_idle(tables.weight, ticks),
        activation_arrivals=_arrivals(tables.activation_arrivals, ticks),
        cotangent_arrivals={},
        chunks=range(0),
    )


def _backward_loop(tables: TickTables, ticks: range, chunks: range) -> TickTables:
    """Returns the backwards of a range of ticks, and the cotangents that are handed over."""
    return tables._replace(
        forward=_idle(tables.forward, ticks),
        backward=_rows(tables.backward, ticks),
        weight=_rows(tables.weight, ticks),
        activation_arrivals={},
        cotangent_arrivals=_arrivals(tables.cotangent_arrivals, ticks),
        chunks=chunks,
    )


def _rows(phase: PhaseTable, ticks: range) -> PhaseTable:
    return PhaseTable(*(table[ticks.start : ticks.stop] for table in phase))


def _idle(phase: PhaseTable, ticks: range) -> PhaseTable:
    no_work = ((-1,) * len(phase.microbatch[0]),) * len(ticks)
    return PhaseTable(*(no_work for _ in phase))


def _arrivals(arrivals: dict[int, Table], ticks: range) -> dict[int, Table]:
    return {offset: table[ticks.start : ticks.stop] for offset, table in arrivals.items()}


def _with_residual_slots(loop: TickTables, slots: int) -> TickTables:
    residuals = dict.fromkeys(("residuals_for_backward", "residuals_for_weight"), slots)
    return loop._replace(num_slots=loop.num_slots | residuals)


def _cut(tables: TickTables) -> tuple[int, int, int] | None:
    """Returns the ticks with which the second loops of forwards and of backwards begin, or None.

    On every rank the first loop of backwards completes the gradients of the later half of the
    chunks and no other, and reads what the second loop of forwards has stored and nothing else. The
    third result is the first chunk of the later half.
    """
    middle, backward = middle_chunk(len(tables.chunks)), tables.backward
    if not middle or not tables.weight.is_idle:
        return None
    earlier, later = [], []
    for tick, rank in _entries(backward.ends_residency):
        if backward.ends_residency[tick][rank] == 1:
            (later if backward.chunk[tick][rank] >= middle else earlier).append(tick)
    backward_cut = max(later) + 1
    read_late = {action for tick, action in _actions(backward) if tick >= backward_cut}
    stored_first, stored_second = [], []
    for tick, action in _actions(tables.forward):
        (stored_first if action in read_late else stored_second).append(tick)
    forward_cut = min(stored_second)
    if backward_cut > min(earlier) or max(stored_first) >= forward_cut:
        return None
    return forward_cut, backward_cut, middle


def _entries(table: Table) -> Iterator[tuple[int, int]]:
    """Yields tick and rank of every entry that is not negative."""
    for tick, row in enumerate(table):
        for rank, entry in enumerate(row):
            if entry >= 0:
                yield tick, rank


def _actions(phase: PhaseTable) -> Iterator[tuple[int, RankAction]]:
    """Yields every action of a phase with its tick."""
    for tick, rank in _entries(phase.microbatch):
        yield tick, (rank, phase.stage[tick][rank], phase.microbatch[tick][rank])


def _with_slots_by_half(tables: TickTables, forward_cut: int) -> tuple[TickTables, tuple[int, int]]:
    """Returns tables with slots in two sets of buffers of residuals, and the slots of each set.

    Forwards before the cut fill the first set. All of a set are stored before the first one is
    read, so that none shares a slot.
    """
    counts: dict[tuple[bool, int], int] = {}
    slots = {}
    for tick, action in _actions(tables.forward):
        key = tick >= forward_cut, action[0]
        slots[action] = counts.get(key, 0)
        counts[key] = slots[action] + 1

    def with_slots(phase: PhaseTable) -> PhaseTable:
        rows = [[-1] * len(row) for row in phase.microbatch]
        for tick, action in _actions(phase):
            rows[tick][action[0]] = slots[action]
        table = tuple(map(tuple, rows))
        return phase._replace(residuals_for_backward_slot=table, residuals_for_weight_slot=table)

    first, second = (
        max(count for (is_second, _), count in counts.items() if is_second == of_second)
        for of_second in (False, True)
    )
    tables = tables._replace(
        forward=with_slots(tables.forward), backward=with_slots(tables.backward)
    )
    return tables, (first, second)
