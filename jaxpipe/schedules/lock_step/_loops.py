"""The loops in which the ticks of a schedule run; those of most schedules run in one.

If all forwards run before all backwards, each have a loop of their own, with one phase to a tick.
Both may be cut in two, where backwards change to the earlier half of a rank's chunks: what forwards
of the later half have stored is then freed before there are gradients of the earlier half.
"""

from collections.abc import Iterator

from ._tables import PhaseTable, Table, TickTables

Work = tuple[int, int, int]
"""Rank, stage and microbatch."""


def middle_chunk(num_chunks: int) -> int:
    """Returns the first chunk of the later half; 0 if nothing is cut in two.

    That is so below 8 chunks: what is saved is then not worth the time to compile more loops.
    """
    return num_chunks // 2 if num_chunks >= 8 else 0


def tick_loops(tables: TickTables, *, in_halves: bool) -> tuple[TickTables, ...]:
    """Returns the tables of the loops that run one after the other.

    Every loop of forwards has buffers of residuals of its own, and those of the last one are read
    first. `chunks` of a loop are the chunks whose gradients it completes.

    Args:
        in_halves: Whether a rank completes the gradients of its chunks one after the other, so that
            loops may be cut in two.
    """
    if tables.backward.is_idle:
        return (tables,)
    forwards, backwards = _working_ticks(tables.forward), _working_ticks(tables.backward)
    if forwards[-1] > backwards[0]:
        return (tables,)
    of_forwards = range(forwards[-1] + 1)
    of_backwards = range(backwards[0], len(tables.forward.microbatch))
    cut = _cut(tables) if in_halves else None
    if cut is None:
        return _forwards(tables, of_forwards), _backwards(tables, of_backwards, tables.chunks)
    (forward_cut, backward_cut), middle = cut, middle_chunk(len(tables.chunks))
    tables, (first, second) = _numbered_by_half(tables, forward_cut)
    return (
        _with_residuals(_forwards(tables, of_forwards[:forward_cut]), first),
        _with_residuals(_forwards(tables, of_forwards[forward_cut:]), second),
        _with_residuals(
            _backwards(tables, range(of_backwards.start, backward_cut), tables.chunks[middle:]),
            second,
        ),
        _with_residuals(
            _backwards(tables, range(backward_cut, of_backwards.stop), tables.chunks[:middle]),
            first,
        ),
    )


def _working_ticks(phase: PhaseTable) -> list[int]:
    return [tick for tick, row in enumerate(phase.microbatch) if max(row) >= 0]


def _forwards(tables: TickTables, ticks: range) -> TickTables:
    """Returns the forwards of a range of ticks, and the activations that are handed over."""
    return tables._replace(
        forward=_rows(tables.forward, ticks),
        backward=_idle(tables.backward, ticks),
        weight=_idle(tables.weight, ticks),
        activation_arrivals=_arrivals(tables.activation_arrivals, ticks),
        cotangent_arrivals={},
        chunks=range(0),
    )


def _backwards(tables: TickTables, ticks: range, chunks: range) -> TickTables:
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
    nothing = ((-1,) * len(phase.microbatch[0]),) * len(ticks)
    return PhaseTable(*(nothing for _ in phase))


def _arrivals(arrivals: dict[int, Table], ticks: range) -> dict[int, Table]:
    return {offset: table[ticks.start : ticks.stop] for offset, table in arrivals.items()}


def _with_residuals(loop: TickTables, slots: int) -> TickTables:
    own = dict.fromkeys(("residuals_for_backward", "residuals_for_weight"), slots)
    return loop._replace(num_slots=loop.num_slots | own)


def _cut(tables: TickTables) -> tuple[int, int] | None:
    """Returns the ticks with which the second loops of forwards and of backwards begin, or None.

    On every rank the first loop of backwards completes the gradients of the later half of the
    chunks and no other, and reads what the second loop of forwards has stored and nothing else.
    """
    middle, backward = middle_chunk(len(tables.chunks)), tables.backward
    if not middle or not tables.weight.is_idle:
        return None
    completed: dict[bool, list[int]] = {False: [], True: []}
    for tick, rank in _entries(backward.ends_residency):
        if backward.ends_residency[tick][rank] == 1:
            completed[backward.chunk[tick][rank] >= middle].append(tick)
    backward_cut = max(completed[True]) + 1
    read_by_second = {key for tick, key in _work(backward) if tick >= backward_cut}
    stored = [(tick, key in read_by_second) for tick, key in _work(tables.forward)]
    forward_cut = min(tick for tick, is_second in stored if not is_second)
    if backward_cut > min(completed[False]) or any(
        is_second and tick >= forward_cut for tick, is_second in stored
    ):
        return None
    return forward_cut, backward_cut


def _entries(table: Table) -> Iterator[tuple[int, int]]:
    """Yields tick and rank of every entry that is not negative."""
    for tick, row in enumerate(table):
        for rank, entry in enumerate(row):
            if entry >= 0:
                yield tick, rank


def _work(phase: PhaseTable) -> Iterator[tuple[int, Work]]:
    """Yields the tick of all work of a phase."""
    for tick, rank in _entries(phase.microbatch):
        yield tick, (rank, phase.stage[tick][rank], phase.microbatch[tick][rank])


def _numbered_by_half(tables: TickTables, forward_cut: int) -> tuple[TickTables, tuple[int, int]]:
    """Returns tables with a slot of its own half for all residuals, and the slots of both halves.

    All of a half are stored before the first one is read, so that none shares a slot.
    """
    counts: dict[tuple[bool, int], int] = {}
    slots = {}
    for tick, key in _work(tables.forward):
        half = tick >= forward_cut, key[0]
        slots[key] = counts.get(half, 0)
        counts[half] = slots[key] + 1

    def numbered(phase: PhaseTable) -> PhaseTable:
        rows = [[-1] * len(row) for row in phase.microbatch]
        for tick, key in _work(phase):
            rows[tick][key[0]] = slots[key]
        table = tuple(map(tuple, rows))
        return phase._replace(residuals_for_backward_slot=table, residuals_for_weight_slot=table)

    first, second = (
        max(count for (is_second, _), count in counts.items() if is_second == half)
        for half in (False, True)
    )
    tables = tables._replace(forward=numbered(tables.forward), backward=numbered(tables.backward))
    return tables, (first, second)
