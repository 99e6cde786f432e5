"""Prepares the data of the page's charts: curves, and marks of single steps."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .analysis import Finding
from .record import MAX_POINTS, RunRecord, Series, points

_MAX_MARKS = 200

# Title, unit, and the metrics that share a chart.
MAIN_CHARTS = (
    ("Loss", "", ("loss", "eval_loss")),
    ("Throughput", "tokens/s", ("tokens_per_second",)),
    ("Step time", "s", ("step_time_seconds",)),
    ("Learning rate", "", ("learning_rate",)),
    ("Gradient norm", "", ("gradient_norm",)),
    ("Accuracy", "", ("accuracy", "eval_accuracy")),
    ("Model FLOPs per device", "TFLOP/s", ("tflops_per_second_per_device",)),
    ("Model FLOPs utilisation", "of peak", ("mfu",)),
    ("Peak memory of a device", "GB", ("peak_memory_gb",)),
)

_SPEED = "tokens_per_second"
_SAME_AS_SPEED = {
    "step_time_seconds": "s a step",
    "tflops_per_second_per_device": "TFLOP/s per device",
    "mfu": "of peak",
}
"""Metrics that say the same as the throughput, with their units: said beside its curve, and drawn
further below."""


def chart_data(run: RunRecord, findings: Sequence[Finding]) -> dict[str, Any]:
    """Returns the data of all charts as JSON values, with numbers of five digits.

    Curves of equal steps share them: `charts[i].series[j].steps` is an index into `steps`.
    """
    shared: dict[bytes, int] = {}
    steps: list[list[int]] = []

    def curve(name: str) -> dict[str, Any]:
        drawn = points(run.series[name])
        key = drawn.steps.tobytes()
        if key not in shared:
            shared[key] = len(steps)
            steps.append(drawn.steps.tolist())
        series = {"name": name, "steps": shared[key], "mean": rounded(drawn.mean)}
        if len(drawn.low):
            series |= {"low": rounded(drawn.low), "high": rounded(drawn.high)}
        return series

    said = _said_beside_speed(run)
    usual = {name for _, _, names in MAIN_CHARTS for name in names}
    groups = [*MAIN_CHARTS, *((metric_title(n), "", (n,)) for n in run.series if n not in usual)]
    charts = []
    for title, unit, names in groups:
        if recorded := [name for name in names if name in run.series]:
            label = " ".join([f"{title} over steps.", *(_in_words(run, name) for name in recorded)])
            series = [run.series[name] for name in recorded]
            charts.append(chart_of(title, unit, label, series, wide=title == "Loss"))
            charts[-1]["series"] = [curve(name) for name in recorded]
            if recorded == [_SPEED]:
                charts[-1]["also"] = [
                    {"unit": _SAME_AS_SPEED[name], "mean": rounded(points(run.series[name]).mean)}
                    for name in said
                ]
    return {
        "first": run.steps[0],
        "last": run.steps[-1],
        "bucket": -(-len(run.steps) // MAX_POINTS),
        "steps": steps,
        "charts": charts,
        "marks": _marks(run, findings),
    }


def _said_beside_speed(run: RunRecord) -> list[str]:
    """Returns the recorded metrics that say the same as the throughput, at the same steps."""
    if _SPEED not in run.series:
        return []
    steps = run.series[_SPEED].steps
    return [
        name
        for name in _SAME_AS_SPEED
        if name in run.series and np.array_equal(run.series[name].steps, steps)
    ]


def main_and_more(charts: Sequence[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Returns the indices of the main charts, and those of the others."""
    titles = {title for title, _, _ in MAIN_CHARTS} | {"Evaluation loss", "Evaluation accuracy"}
    if any(chart["title"] == "Throughput" for chart in charts):
        titles -= {title for title, _, names in MAIN_CHARTS if names[0] in _SAME_AS_SPEED}
    main = [i for i, chart in enumerate(charts) if chart["title"] in titles]
    return main, [i for i in range(len(charts)) if i not in main]


def _in_words(run: RunRecord, name: str) -> str:
    values = run.series[name].finite
    if not len(values):
        return f"{name} has no finite value."
    return (
        f"{name} goes from {values[0]:.4g} to {values[-1]:.4g}, between {values.min():.4g} and "
        f"{values.max():.4g}."
    )


def _marks(run: RunRecord, findings: Sequence[Finding]) -> dict[str, list[int]]:
    titles = ("Skipped steps", "loss is not a number", "gradient_norm is not a number")
    bad = {step for finding in findings if finding.title in titles for step in finding.steps}
    marks = {
        "restarts": [s["first_step"] for s in run.starts if s["first_step"] > 1],
        "checkpoints": [saved.step for saved in run.saved if saved.state == "complete"],
        "bad": sorted(bad),
    }
    return {name: steps[:_MAX_MARKS] for name, steps in marks.items()}


def chart_of(
    title: str, unit: str, label: str, series: Sequence[Series], *, wide: bool
) -> dict[str, Any]:
    """Returns the attributes of a chart of some metrics, without its curves."""
    return {
        "title": title,
        "unit": unit,
        "wide": wide,
        "from_zero": unit != "",
        "may_log": all(len(s.finite) and (s.finite > 0).all() for s in series),
        "label": label,
    }


def metric_title(name: str) -> str:
    """Returns the title of the chart of a metric that is not in `MAIN_CHARTS`."""
    return name.replace("_", " ").capitalize()


def rounded(values: np.ndarray) -> list[float | None]:
    """Returns numbers of five digits; None stands for values that are not finite."""
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in values.tolist()]
