"""On what a run ran: `starts.jsonl` has an object for each time it began or went on."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from ._json_lines import read_lines, write_lines
from ._metrics import FILE as METRICS
from ._metrics import read_metrics
from ._setup import Setup

FILE = "starts.jsonl"


def record_start(folder: Path, setup: Setup, done: int) -> None:
    """Adds a line, before the metrics of steps that come again are dropped.

    The file is written anew: what is appended to a torn line is torn with it.

    Args:
        folder: Of the run.
        setup: The run.
        done: Steps of the checkpoint it goes on from.

    Raises:
        ValueError: If a line of `metrics.jsonl` or of `starts.jsonl` is broken.
    """
    path = folder / METRICS
    before = read_metrics(path) if path.exists() else []
    start = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "first_step": done + 1,
        "repeated_steps": sum(entry["step"] > done for entry in before),
        "num_devices": setup.mesh.size,
        "device_kind": setup.mesh.devices.flat[0].device_kind,
        "num_processes": jax.process_count(),
        "jax_version": jax.__version__,
    }
    write_lines(folder / FILE, [*read_starts(folder), start])


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """The starts of a run, in order; none if it is older than this file.

    Raises:
        ValueError: If a line is not a JSON object with a `first_step`; a last one may be torn.
    """
    path = folder / FILE
    return read_lines(path, key="first_step") if path.exists() else []
