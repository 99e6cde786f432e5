"""Turns metrics into columns, and shortens these for drawing."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

MAX_POINTS = 500
"""The most points of a curve. Longer ones are drawn as means and bounds of neighbours."""


@dataclass(frozen=True)
class Series:
    """A metric over steps."""

    steps: np.ndarray  # [N] the steps at which the metric was written, ascending
    values: np.ndarray  # [N] its values; may be NaN or infinite

    @property
    def finite(self) -> np.ndarray:
        """Finite values, [n]."""
        return self.values[np.isfinite(self.values)]


@dataclass(frozen=True)
class Points:
    """A series in buckets, as it is drawn."""

    steps: np.ndarray  # [n] the first step of each bucket
    mean: np.ndarray  # [n] the mean of each bucket; NaN if it has no finite value
    low: np.ndarray  # [n] the minimum of each bucket; empty if a bucket is one step
    high: np.ndarray  # [n] the maximum of each bucket; empty if a bucket is one step


def to_series(entries: Sequence[dict[str, Any]], where: str) -> tuple[list[int], dict[str, Series]]:
    """Turns lines of metrics, whose steps must ascend, into series."""
    steps = [entry["step"] for entry in entries]
    for line_number, (before, after) in enumerate(pairwise(steps), start=2):
        if not isinstance(after, int) or after <= before:
            raise ValueError(
                f"{where} line {line_number} is of step {after!r}, after one of step {before!r}. "
                "Remove the line."
            )
    columns: dict[str, tuple[list[int], list[float]]] = {}
    for entry in entries:
        for name, value in entry.items():
            if name != "step" and isinstance(value, int | float):
                metric_steps, metric_values = columns.setdefault(name, ([], []))
                metric_steps.append(entry["step"])
                metric_values.append(float(value))
    return steps, {
        name: Series(np.array(metric_steps), np.array(metric_values))
        for name, (metric_steps, metric_values) in columns.items()
    }


def points(series: Series, most: int = MAX_POINTS) -> Points:
    """Puts a series into buckets of equally many steps."""
    count = len(series.steps)
    size = -(-count // most)
    values = np.where(np.isfinite(series.values), series.values, np.nan)
    if size == 1:
        return Points(series.steps, values, np.array([]), np.array([]))
    edges = np.arange(0, count, size)
    valid = np.isfinite(values)
    num_valid = np.add.reduceat(valid.astype(int), edges)
    empty = num_valid == 0
    total = np.add.reduceat(np.where(valid, values, 0.0), edges)
    low = np.minimum.reduceat(np.where(valid, values, np.inf), edges)
    high = np.maximum.reduceat(np.where(valid, values, -np.inf), edges)
    mean = np.where(empty, np.nan, total / np.maximum(num_valid, 1))
    return Points(
        series.steps[edges], mean, np.where(empty, np.nan, low), np.where(empty, np.nan, high)
    )
