"""Summarises a run in a few figures."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..train.plan import BatchPlan, StepPlan
from .analysis import Status
from .record import RunRecord


@dataclass(frozen=True)
class Card:
    """A figure in large digits."""

    name: str
    value: str  # the figure as text
    unit: str = ""  # the unit beside it
    more: str = ""  # the line below it


def facts(run: RunRecord, devices: int | None, plan: StepPlan | None) -> list[tuple[str, str]]:
    """Returns the model, the devices and the sizes of a run."""
    values, last = run.values, run.starts[-1] if run.starts else {}
    kind = last.get("device_kind", "")
    rows = [
        ("Model", str(values.get("model_name", "unknown"))),
        ("Engine", str(values.get("pipeline_engine", "unknown"))),
        ("Devices", f"{devices or 'unknown'}{f' x {kind}' if kind else ''}"),
    ]
    if last.get("num_processes", 1) > 1:
        rows.append(("Processes", str(last["num_processes"])))
    if plan:
        axes = [f"{axis} {size}" for axis, size in plan.pipeline.mesh.shape.items() if size > 1]
        rows += [
            ("Mesh", " × ".join(axes) or "one device"),
            ("Parameters", _short(plan.state.weights.num_parameters)),
            ("Batch", f"{plan.batch.num_rows} × {plan.batch.length} tokens"),
            ("Microbatches", _microbatches(plan.batch)),
        ]
    return rows


def _microbatches(batch: BatchPlan) -> str:
    """Returns the factors of the batch: calls of the engine if several, microbatches, rows."""
    calls = batch.gradient_accumulation_steps
    prefix = f"{calls} calls × " if calls > 1 else ""
    return f"{prefix}{batch.num_microbatches} × {batch.microbatch_size} rows"


def cards(run: RunRecord, status: Status) -> Iterator[Card]:
    """Yields a card for each figure that the metrics of a run have."""
    loss, evaluation = _finite(run, "loss"), _finite(run, "eval_loss")
    if len(loss):
        yield Card("Loss", f"{loss[-1]:.4g}", more=f"from {loss[0]:.4g}, least {loss.min():.4g}")
    if len(evaluation):
        best = run.series["eval_loss"].steps[int(np.nanargmin(run.series["eval_loss"].values))]
        more = f"best {evaluation.min():.4g} at step {best}"
        yield Card("Evaluation loss", f"{evaluation[-1]:.4g}", more=more)
    times, rates = _finite(run, "step_time_seconds"), _finite(run, "tokens_per_second")
    if len(rates):
        yield Card("Throughput", _short(float(np.median(rates))), "tokens/s", "median of steps")
    if len(times):
        median = float(np.median(times))
        yield Card("Step", _duration(median), more="median of steps")
        yield Card("Time in steps", _duration(float(times.sum())), more=_left(status, median))
    if len(rates) and len(rates) == len(times):
        yield Card("Tokens", _short(float((rates * times).sum())), more="in these steps")
    if len(shares := _finite(run, "mfu")):
        yield Card("Utilisation", f"{np.median(shares):.1%}", "of peak", "median of steps")
    if len(flops := _finite(run, "tflops_per_second_per_device")):
        median = float(np.median(flops))
        scale, unit = (1, "TFLOP/s") if median >= 0.1 else (1e3, "GFLOP/s")
        yield Card("Model FLOPs", f"{median * scale:.3g}", unit, "per device, median")


def metric_rows(run: RunRecord) -> list[tuple[str, ...]]:
    """Returns first, last, least, median and largest value, and their number, of each metric."""
    rows = []
    for name, series in run.series.items():
        values = series.finite
        first_and_last = f"{series.values[0]:.5g}", f"{series.values[-1]:.5g}"
        stats = (values.min(), np.median(values), values.max()) if len(values) else (np.nan,) * 3
        rows.append((name, *first_and_last, *(f"{v:.5g}" for v in stats), f"{len(series.steps):,}"))
    return rows


def _finite(run: RunRecord, name: str) -> np.ndarray:
    return run.series[name].finite if name in run.series else np.array([])


def _left(status: Status, seconds: float) -> str:
    if status.kind != "running":
        return f"of {status.done:,} steps"
    return f"about {_duration(seconds * (status.num_steps - status.done))} left"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _short(value: int | float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.4g}"
