"""Fills the template of the page on several runs."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ... import __version__
from .._charts import main_and_more
from .._page import environment
from .._settings import Setting, settings
from .._summary import cards
from ..analysis import Status, status
from ..record import RunRecord, points
from ._curves import comparison_data

MAX_RUNS = 12
"""The most runs that lines of different colours and dashes tell apart."""

_OWN_KEYS = ("run_name", "output_dir")


def render_comparison(runs: Sequence[RunRecord], *, now: datetime) -> str:
    """Renders runs as one HTML page that loads nothing else."""
    if len(runs) > MAX_RUNS:
        raise ValueError(f"`runs` has {len(runs)} runs, and a page shows up to {MAX_RUNS}.")
    folders = [run.folder.resolve() for run in runs]
    if len(set(folders)) < len(folders):
        raise ValueError(f"`runs` has a folder twice: {', '.join(map(str, folders))}.")
    labels = run_labels(runs)
    data = comparison_data(runs, labels)
    main, more = main_and_more(data["charts"])
    states = [status(run, now.timestamp()) for run in runs]
    differing = differing_settings(runs)
    return (
        environment()
        .get_template("comparison.html")
        .render(
            runs=list(zip(labels, states, runs, strict=True)),
            labels=labels,
            figures=_figure_rows(runs, states),
            differing=[[row[0].key, *(s.value for s in row), row[0].meaning] for row in differing],
            charts=data["charts"],
            axes=data["axes"],
            main=main,
            more=more,
            bucketed=any(len(points(s).low) for run in runs for s in run.series.values()),
            made=f"{now:%Y-%m-%d %H:%M} UTC",
            version=__version__,
            data=data,
        )
    )


def run_labels(runs: Sequence[RunRecord]) -> list[str]:
    """Returns names that tell runs apart."""
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else str(Path(run.folder))
        for name, run in zip(names, runs, strict=True)
    ]


def differing_settings(runs: Sequence[RunRecord]) -> list[list[Setting]]:
    """Returns each setting that differs between runs, one for every run; "" where it is missing."""
    of_runs = [{setting.key: setting for setting in settings(run.values)} for run in runs]
    keys = dict.fromkeys(key for values in of_runs for key in values if key not in _OWN_KEYS)
    rows = [[_setting(key, values, of_runs) for values in of_runs] for key in keys]
    return [row for row in rows if len({setting.value for setting in row}) > 1]


def _setting(
    key: str, values: dict[str, Setting], of_runs: Sequence[dict[str, Setting]]
) -> Setting:
    if key in values:
        return values[key]
    other = next(settings[key] for settings in of_runs if key in settings)
    return Setting(key, "", other.default, "unknown", other.meaning)


def _figure_rows(runs: Sequence[RunRecord], states: Sequence[Status]) -> list[list[Any]]:
    """Returns rows of a name and the figure of every run."""
    of_runs = [
        {card.name: f"{card.value} {card.unit}".strip() for card in cards(run, state)}
        for run, state in zip(runs, states, strict=True)
    ]
    names = dict.fromkeys(name for figures in of_runs for name in figures)
    return [[name, *(figures.get(name, "") for figures in of_runs)] for name in names]
