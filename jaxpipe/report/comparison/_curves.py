"""Prepares the curves of several runs: each metric is a chart, and each run a curve in it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._charts import MAIN_CHARTS, chart_of, metric_title, rounded
from ..record import RunRecord, Series, points

_SPEED = ("step_time_seconds", "tokens_per_second", "tflops_per_second_per_device", "mfu")
_COMPILES = 3.0
"""How many times the median a first step takes at least if it has compiled."""

_TIME_UNITS = (("h", 3600.0), ("min", 60.0), ("s", 1.0))


@dataclass(frozen=True)
class Axis:
    """What may be the x axis of all charts."""

    name: str  # `step`, `tokens` or `time`
    title: str
    unit: str  # the unit of its values, such as `h`
    at: list[np.ndarray]  # for each run, [steps] the value at each step of its metrics


def axes_of(runs: Sequence[RunRecord]) -> list[Axis]:
    """Returns steps, and tokens and time in steps if all runs have metrics of their speed."""
    steps = [np.array(run.steps) for run in runs]
    axes = [Axis("step", "Step", "", steps)]
    seconds = [_seconds(run) for run in runs]
    rates = [_per_step(run, "tokens_per_second") for run in runs]
    if not all(len(of_run) for of_run in (*seconds, *rates)):
        return axes
    # Tokens of a step come from its measured speed, which is exact; its time may not be.
    raw = [_per_step(run, "step_time_seconds") for run in runs]
    tokens = [
        _running_sum(rate * time, run) for rate, time, run in zip(rates, raw, runs, strict=True)
    ]
    times = [_running_sum(time, run) for time, run in zip(seconds, runs, strict=True)]
    longest = max(float(time[-1]) for time in times)
    unit, size = next((u for u in _TIME_UNITS if longest >= 2 * u[1]), _TIME_UNITS[-1])
    return [
        *axes,
        Axis("tokens", "Tokens", "tokens", [np.round(of_run) for of_run in tokens]),
        Axis("time", f"Time in steps ({unit})", unit, [time / size for time in times]),
    ]


def comparison_data(runs: Sequence[RunRecord], labels: Sequence[str]) -> dict[str, Any]:
    """Returns the data of all charts as JSON values, like `chart_data`.

    Each series has the index of its run, and for every axis an index into `steps`, the list of what
    is on the x axis.
    """
    axes = axes_of(runs)
    shared: dict[tuple[float, ...], int] = {}

    def index_of(values: np.ndarray) -> int:
        key = tuple(int(x) if float(x).is_integer() else float(f"{x:.6g}") for x in values.tolist())
        return shared.setdefault(key, len(shared))

    charts = []
    for metric, title, unit in _metrics(runs):
        series = [run.series[metric] for run in runs if metric in run.series]
        label = f"{title} of {len(series)} runs."
        chart = chart_of(title, unit, label, series, wide=metric == "loss")
        charts.append(chart | {"metric": metric, "series": []})
        for i, run in enumerate(runs):
            if metric in run.series:
                drawn = points(_without_compilation(run, metric))
                x = {a.name: index_of(np.interp(drawn.steps, run.steps, a.at[i])) for a in axes}
                curve = {"run": i, "name": labels[i], "x": x, "mean": rounded(drawn.mean)}
                charts[-1]["series"].append(curve)
    return {
        "axes": [_axis_data(axis) for axis in axes],
        "steps": [list(values) for values in shared],
        "charts": charts,
        "marks": {"restarts": [], "checkpoints": [], "bad": []},
    }


def _axis_data(axis: Axis) -> dict[str, Any]:
    least = min(float(of_run[0]) for of_run in axis.at) if axis.name == "step" else 0.0
    most = max(float(of_run[-1]) for of_run in axis.at)
    column = axis.name if axis.name != "time" else f"time_{axis.unit}"
    return {
        "name": axis.name,
        "title": axis.title,
        "unit": axis.unit,
        "column": column,
        "first": least,
        "last": max(most, least + 1) if axis.name == "step" else most or 1.0,
    }


def _metrics(runs: Sequence[RunRecord]) -> Iterator[tuple[str, str, str]]:
    """Yields name, title and unit of every metric that a run has, the important ones first."""
    recorded = dict.fromkeys(name for run in runs for name in run.series)
    main = [(name, title, unit) for title, unit, names in MAIN_CHARTS for name in names]
    for name, title, unit in main:
        if name in recorded:
            is_evaluation = name.startswith("eval_")
            yield name, f"Evaluation {title.lower()}" if is_evaluation else title, unit
    names = {name for name, _, _ in main}
    yield from ((name, metric_title(name), "") for name in recorded if name not in names)


def _per_step(run: RunRecord, metric: str) -> np.ndarray:
    """Returns a metric at every step of a run; empty if the run does not have it."""
    if metric not in run.series or not len(run.series[metric].finite):
        return np.array([])
    series = run.series[metric]
    finite = np.isfinite(series.values)
    return np.interp(run.steps, series.steps[finite], series.values[finite])


def _compiling_steps(run: RunRecord) -> np.ndarray:
    """Returns the first steps of starts that took long: older versions compiled in them."""
    if "step_time_seconds" not in run.series:
        return np.array([], int)
    times = run.series["step_time_seconds"]
    firsts = [run.steps[0], *(start.get("first_step", 0) for start in run.starts)]
    median = float(np.median(times.finite)) if len(times.finite) else 0.0
    return times.steps[np.isin(times.steps, firsts) & (times.values > _COMPILES * median)]


def _without_compilation(run: RunRecord, metric: str) -> Series:
    """Returns a metric, of which one of speed is not a number where a step has compiled."""
    series = run.series[metric]
    if metric not in _SPEED:
        return series
    compiles = np.isin(series.steps, _compiling_steps(run))
    return Series(series.steps, np.where(compiles, np.nan, series.values))


def _seconds(run: RunRecord) -> np.ndarray:
    """Returns the seconds of every step; the median for those that have compiled."""
    seconds = _per_step(run, "step_time_seconds")
    if not len(seconds):
        return seconds
    compiles = np.isin(run.steps, _compiling_steps(run))
    return np.where(compiles, np.median(seconds), seconds)


def _running_sum(values: np.ndarray, run: RunRecord) -> np.ndarray:
    """Returns the sum up to every step; steps without a line count as the first one."""
    steps = np.array(run.steps)
    return np.cumsum(values * np.diff(steps, prepend=0))
