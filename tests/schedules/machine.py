"""A machine that runs tables with the names of things instead of arrays.

Its buffers refuse to be read where nothing or something else lies, and to be written where there
is still something.
"""

from collections.abc import Sequence
from typing import Any

from jaxpipe.schedules import Action, Op, Schedule
from jaxpipe.schedules.lock_step import TickTables

Buffer = dict[int, tuple[int, int]]
"""Slots with the (stage, microbatch) of what lies there."""

_RESIDUALS = "residuals_for_backward", "residuals_for_weight"


def run_tables(table: TickTables, schedule: Schedule) -> set[Action]:
    """Every action that ran. Fails where an engine would compute with the wrong array."""
    return run_loops((table,), schedule)


def run_loops(loops: Sequence[TickTables], schedule: Schedule) -> set[Action]:
    """Runs loops one after the other, as `run_tables` runs one.

    Each with forwards has buffers of residuals of its own. One without takes the last of those
    that wait, and leaves them empty.
    """
    buffers: list[dict[str, Buffer]] = [
        {name: {} for name in loops[0].num_slots} for _ in schedule.programs
    ]
    done: set[Action] = set()
    waiting: list[list[dict[str, Buffer]]] = []
    for table in loops:
        new = [{name: {} for name in _RESIDUALS} for _ in buffers]
        for mine, residuals in zip(
            buffers, waiting.pop() if table.forward.is_idle else new, strict=True
        ):
            mine |= residuals
        for tick in range(len(table.forward.microbatch)):
            done |= _tick(table, tick, buffers, schedule.num_stages - 1)
        if table.backward.is_idle:
            waiting.append([{name: mine[name] for name in _RESIDUALS} for mine in buffers])
            continue
        assert not any(mine[name] for mine in buffers for name in _RESIDUALS)
    assert not waiting
    for mine in buffers:
        for name, buffer in mine.items():
            assert not buffer, f"{name} still has {buffer}"
    return done


def _tick(table: TickTables, tick: int, buffers: list[dict[str, Buffer]], last: int) -> set[Action]:
    done: set[Action] = set()
    for rank, mine in enumerate(buffers):
        done |= _forward(_row(table.forward, tick, rank), mine, last)
        for name in _RESIDUALS:
            assert max(mine[name], default=-1) < table.num_slots[name]
    if not table.forward.is_idle:
        _hand_over(table, "activation_arrivals", tick, buffers, 1, last)
    for rank, mine in enumerate(buffers):
        done |= _backward(_row(table.backward, tick, rank), mine)
        done |= _weight(_row(table.weight, tick, rank), mine)
    if not table.backward.is_idle:
        _hand_over(table, "cotangent_arrivals", tick, buffers, -1, 0)
    return done


def _row(work: Any, tick: int, rank: int) -> dict[str, int]:
    return {name: column[tick][rank] for name, column in work._asdict().items()}


def _write(buffer: Buffer, slot: int, place: tuple[int, int]) -> None:
    assert slot >= 0 and slot not in buffer, f"{place} overwrites {buffer.get(slot)}"
    buffer[slot] = place


def _forward(row: dict[str, int], mine: dict[str, Buffer], last: int) -> set[Action]:
    if row["microbatch"] < 0:
        return set()
    place = row["stage"], row["microbatch"]
    if place[0]:
        assert mine["inputs"].pop(row["input_slot"]) == place
    for name in _RESIDUALS:
        _write(mine[name], row[f"{name}_slot"], place)
    if place[0] == last:
        _write(mine["cotangents"], row["cotangent_slot"], place)
    return {Action(place[0], Op.F, place[1])}


def _backward(row: dict[str, int], mine: dict[str, Buffer]) -> set[Action]:
    if row["microbatch"] < 0:
        return set()
    place = row["stage"], row["microbatch"]
    assert mine["cotangents"].pop(row["cotangent_slot"]) == place
    assert mine["residuals_for_backward"].pop(row["residuals_for_backward_slot"]) == place
    assert mine["residuals_for_weight"][row["residuals_for_weight_slot"]] == place
    if row["wgrad_residuals_slot"] < 0:
        del mine["residuals_for_weight"][row["residuals_for_weight_slot"]]
        return {Action(place[0], Op.B, place[1])}
    _write(mine["wgrad_residuals"], row["wgrad_residuals_slot"], place)
    return {Action(place[0], Op.I, place[1])}


def _weight(row: dict[str, int], mine: dict[str, Buffer]) -> set[Action]:
    if row["microbatch"] < 0:
        return set()
    place = row["stage"], row["microbatch"]
    assert mine["wgrad_residuals"].pop(row["wgrad_residuals_slot"]) == place
    assert mine["residuals_for_weight"].pop(row["residuals_for_weight_slot"]) == place
    return {Action(place[0], Op.W, place[1])}


def _hand_over(
    table: TickTables, kind: str, tick: int, buffers: list[dict[str, Buffer]], step: int, end: int
) -> None:
    """What every rank made goes to the rank that has a slot for it, and all of it arrives."""
    work, waiting = (
        (table.forward, "inputs")
        if kind == "activation_arrivals"
        else (table.backward, "cotangents")
    )
    arrived = 0
    for offset, slots in getattr(table, kind).items():
        for rank, mine in enumerate(buffers):
            if slots[tick][rank] >= 0:
                made = _row(work, tick, (rank - offset) % len(buffers))
                assert made["microbatch"] >= 0
                place = made["stage"] + step, made["microbatch"]
                _write(mine[waiting], slots[tick][rank], place)
                arrived += 1
    rows = [_row(work, tick, rank) for rank in range(len(buffers))]
    assert arrived == sum(row["microbatch"] >= 0 and row["stage"] != end for row in rows)
