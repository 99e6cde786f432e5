"""On what a run ran: `starts.jsonl` has an object for each time it began or went on."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from ._metrics import FILE as METRICS
from ._metrics import read_metrics
from ._setup import Setup

FILE = "starts.jsonl"


def record_start(folder: Path, setup: Setup, done: int) -> None:
    """Adds a line, before the metrics of steps that come again are dropped.

    Args:
        folder: Of the run.
        setup: The run.
        done: Steps of the checkpoint it goes on from.
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
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(start) + "\n")


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """The starts of a run, in order; none if it is older than this file.

    Raises:
        ValueError: If a line is not a JSON object with a `first_step`; a last one may be torn.
    """
    path = folder / FILE
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            start = json.loads(line)
        except json.JSONDecodeError:
            start = None
        if not isinstance(start, dict) or not isinstance(start.get("first_step"), int):
            raise ValueError(
                f"{path} line {number} is {line[:80]!r}, not an object with a `first_step`. "
                "Remove the line."
            )
        found.append(start)
    return found
