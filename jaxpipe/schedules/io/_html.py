"""Schedules as one interactive page of HTML that loads nothing else.

The page has the order of every schedule and what each step waits for, and computes times itself: a
slider changes a cost, and every bar moves. The script follows `simulate` and `simulate_ticks`.
"""

import json
from collections.abc import Mapping
from html import escape
from importlib import resources

from ..analysis._simulate import Costs, PerStage, Time, check_costs, halves_of_pairs
from ..language._action import Action, ScheduleStep, actions_of
from ..language._dependencies import ResultKey, walk_topologically
from ..language._schedule import Schedule, describe, stages_of_rank, without_fused_pairs
from ..lock_step._ticks import Ticks, check_ticks
from ._svg import COLOURS, box_label, needs_dark_ink, shade


def to_html(schedules: Mapping[str, Schedule | Ticks], costs: Costs, title: str = "") -> str:
    """Draws schedules below each other, with a common axis of time and sliders for the costs.

    Args:
        schedules: Schedules by name; those in lock-step are drawn in their ticks.
        costs: The costs at which the page opens, of a stage of the first schedule. If another one
            has twice as many stages, each of them costs and stores half. Costs per stage keep their
            ratios under a slider.

    Returns:
        The text of an HTML page, which reads no other file.

    Example:
        >>> from jaxpipe.schedules import build
        >>> page = to_html({"1f1b": build("1f1b", ranks=2, microbatches=4)}, Costs())
        >>> page.splitlines()[0]
        '<!doctype html>'
    """
    drawn = [_drawn(name, schedule, costs) for name, schedule in schedules.items()]
    for row in drawn:
        row["work"] = drawn[0]["stages"] / row["stages"]
        if row["work"] != 1:
            times = f"{row['work']:g} times the work of {drawn[0]['name']}'s"
            row["about"] += f"; its stages have {times}"
    chunks = max((row["chunks"] for row in drawn), default=1)
    data = {
        "schedules": drawn,
        "costs": {
            "F": _scaled(costs.forward),
            "I": _scaled(costs.input),
            "W": _scaled(costs.weight),
            "T": {"value": float(costs.transfer), "ratios": [1]},
        },
        "ops": {
            op.name: {"label": label, "boxes": [_box(colour, i, chunks) for i in range(chunks)]}
            for op, (colour, label) in COLOURS.items()
        },
    }
    script = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = _file("schedule.html").replace("{{title}}", escape(title or ", ".join(schedules)))
    for name, text in (
        ("style", _file("schedule.css")),
        ("script", _file("schedule.js")),
        ("data", script),
    ):
        page = page.replace("{{" + name + "}}", text)
    return page


def _drawn(name: str, order: Schedule | Ticks, costs: Costs) -> dict:
    """Returns the data that the script reads: the steps of a schedule, in an order that can run."""
    schedule = order.schedule if isinstance(order, Ticks) else order
    check_costs(costs, schedule.num_stages)
    steps = _ticked(check_ticks(order)) if isinstance(order, Ticks) else _ordered(order, costs)
    stages = [stages_of_rank(schedule, rank) for rank in range(len(schedule.programs))]
    return {
        "name": name,
        "about": describe(schedule) + (", in ticks of all ranks" * isinstance(order, Ticks)),
        "ranks": len(schedule.programs),
        "stages": schedule.num_stages,
        "chunks": max(map(len, stages), default=1),
        "steps": [
            {
                "rank": rank,
                "tick": tick,
                "text": str(step),
                "factor": factor,
                "after": after,
                "actions": [
                    [a.op.name, a.stage, a.microbatch, stages[rank].index(a.stage), box_label(a)]
                    for a in actions_of(step)
                ],
            }
            for rank, tick, step, factor, after in steps
        ],
    }


Row = tuple[int, int | None, ScheduleStep, Time, list[int]]
"""A step: its rank, its tick if it has one, itself, the factor of its time, and what it awaits."""


def _ordered(schedule: Schedule, costs: Costs) -> list[Row]:
    """Returns the steps after all that they await, with the positions of those of other ranks."""
    runnable = schedule if costs.atomic_pairs else without_fused_pairs(schedule)
    halves = halves_of_pairs(schedule)
    rows: list[Row] = []
    row_of: dict[ResultKey, int] = {}
    for rank, step, waits, outputs in walk_topologically(runnable):
        after = sorted({row_of[need] for need in waits if rows[row_of[need]][0] != rank})
        paired = step in halves if isinstance(step, Action) else costs.atomic_pairs
        rows.append((rank, None, step, costs.pair_factor if paired else 1, after))
        row_of.update(dict.fromkeys(outputs, len(rows) - 1))
    return rows


def _ticked(ticks: Ticks) -> list[Row]:
    """Returns the steps tick by tick; those of a rank in a tick keep their order."""
    rows: list[Row] = [
        (rank, tick, step, 1, [])
        for rank, program in enumerate(ticks.schedule.programs)
        for step, tick in zip(program, ticks.tick_of[rank], strict=True)
    ]
    return sorted(rows, key=lambda row: (row[1], row[0]))


def _scaled(cost: PerStage) -> dict:
    """Returns the mean of a cost, and the cost of every stage divided by it."""
    each = cost if isinstance(cost, tuple) else (cost,)
    mean = sum(each) / len(each)
    return {"value": float(mean), "ratios": [float(c / mean) if mean else 1.0 for c in each]}


def _box(colour: str, chunk: int, chunks: int) -> list[str]:
    fill = shade(colour, chunk, chunks)
    return [fill, "#1f2328" if needs_dark_ink(fill) else "#ffffff"]


def _file(name: str) -> str:
    return resources.files("jaxpipe.schedules.io").joinpath(name).read_text(encoding="utf-8")
