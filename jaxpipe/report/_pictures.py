"""Draws a run's schedule: as predicted, and as it ran in a traced step."""

from dataclasses import dataclass
from pathlib import Path

from .. import schedules
from .._input import MAX_JSON_BYTES, parse_json, read_text, short_repr
from ..schedules import Timeline, analysis, language
from ..schedules.analysis import TimedStep
from ..train.plan import StepPlan

MAX_ACTIONS = 20_000
"""The most actions of a drawing, which then has half a megabyte."""


@dataclass(frozen=True)
class Picture:
    """The drawing of a timeline."""

    title: str
    svg: str  # the drawing; "" if it has more than `MAX_ACTIONS` actions
    bubble: float  # the share of its time in which the busiest rank waits


def predicted_timeline_picture(plan: StepPlan, name: str) -> Picture | None:
    """Draws the schedule of a run with its predicted costs."""
    timeline = plan.predicted_timeline
    return None if timeline is None else _drawn("Predicted", name, timeline)


def figures(plan: StepPlan, name: str) -> list[tuple[str, str]]:
    """Returns the figures of a run's schedule."""
    timeline = plan.predicted_timeline
    if timeline is None:
        return []
    schedule, end = timeline.schedule, schedules.makespan(timeline)
    buffers = plan.engine.buffers(plan.pipeline)
    stored = sorted({on_rank.residuals for on_rank in buffers})[::-1]
    lock_step = not plan.engine.program_per_rank
    return [
        ("Schedule", name),
        ("Ranks", f"{schedules.num_ranks(schedule)}"),
        ("Stages", f"{schedule.num_stages}"),
        ("Microbatches", f"{schedule.num_microbatches}"),
        ("Bubble", f"{schedules.bubble_fraction(timeline):.1%}"),
        ("Parallelogram bubble", f"{analysis.parallelogram_bubble(timeline) / end:.1%}"),
        ("Runs", "in ticks of all ranks" if lock_step else "each rank as soon as it can"),
        ("Residuals stored", " ".join(map(str, stored)) + " by rank" * (len(stored) > 1)),
    ]


def traced_step_pictures(file: Path) -> list[Picture]:
    """Draws a traced step as it ran, and as its schedule predicts it with measured durations."""
    try:
        text = read_text(file, most_bytes=MAX_JSON_BYTES)
        events = parse_json(text, str(file))["traceEvents"]
        names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        rows: dict[str, dict[int, list[TimedStep]]] = {}
        for event in events:
            if event["ph"] == "X":
                rank, kind = names[event["pid"]].removeprefix("rank ").split(", ")
                start, end = event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3
                timed = TimedStep(language.parse_step(event["name"]), start, end)
                rows.setdefault(kind, {}).setdefault(int(rank), []).append(timed)
        step = f"step {file.stem.removeprefix('trace_')}"
        titles = {
            "measured": f"Measured in {step}",
            "predicted": f"Predicted with the lengths of {step}",
        }
        return [
            _drawn(titles[kind], f"{step.capitalize()}, milliseconds", _timeline(ranks))
            for kind, ranks in rows.items()
        ]
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{file} is no trace of `mpmd_trace_step`: {short_repr(error)}. Remove it, or write it "
            "again."
        ) from None


def _timeline(ranks: dict[int, list[TimedStep]]) -> Timeline:
    rows = [tuple(sorted(ranks.get(r, []), key=lambda t: t.start)) for r in range(max(ranks) + 1)]
    text = "\n".join(" ".join(str(timed.step) for timed in row) for row in rows)
    return Timeline(schedules.parse(text), tuple(rows))


def _drawn(title: str, inside: str, timeline: Timeline) -> Picture:
    is_small = sum(map(len, timeline.rows)) <= MAX_ACTIONS
    svg = schedules.to_svg(timeline, inside) if is_small else ""
    return Picture(title, svg, schedules.bubble_fraction(timeline))
