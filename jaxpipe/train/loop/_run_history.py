"""Records the history of a run in two files.

`starts.jsonl` has an object for each start; `saved.json` has the newest step of which a checkpoint
was ever complete.
"""

import json
import os
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from ..._durable import fsync, rename, write_file
from ..checkpoint._digests import sha256_of
from ..logs._json_lines import complete_lines, parse_line, read_lines, write_lines
from ..logs._metrics import METRICS_FILE
from ..logs._trackers import TRACKERS_FILE
from ..runtime._reading import read_file

STARTS_FILE = "starts.jsonl"

SAVED_FILE = "saved.json"
"""Kept outside of `checkpoints`, to show that there were some if their disk is not mounted."""


def record_start(folder: Path, mesh: Mesh, done: int) -> None:
    """Adds a line to `starts.jsonl`, before the metrics of repeated steps are dropped.

    The file is written anew: what is appended to a torn line is torn with it.
    """
    start = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "first_step": done + 1,
        "repeated_steps": sum(step > done for step in _steps_of_metrics(folder)),
        "num_devices": mesh.size,
        "device_kind": mesh.devices.flat[0].device_kind,
        "num_processes": jax.process_count(),
        "jax_version": jax.__version__,
    }
    write_lines(folder / STARTS_FILE, [*read_starts(folder), start])


def _steps_of_metrics(folder: Path) -> list[int]:
    """Returns the steps that have metrics. Broken lines, which a power loss leaves, are skipped."""
    steps = []
    for _, line in complete_lines(folder / METRICS_FILE):
        with suppress(ValueError):
            steps.append(parse_line(line, "step", METRICS_FILE)["step"])
    return steps


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Reads the starts of a run, in order; none if the run is older than this file."""
    return read_lines(folder / STARTS_FILE, key="first_step")


def record_saved(folder: Path, step: int) -> None:
    """Records that the checkpoint of a step is complete."""
    write_file(folder / SAVED_FILE, json.dumps({"newest_step": step}) + "\n")


def read_saved(folder: Path) -> int | None:
    """Returns the newest step that was ever saved, 0 for none; None if `saved.json` holds none."""
    data = read_file(folder / SAVED_FILE) or b"null"
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        return int(json.loads(data)["newest_step"])
    return None


def fsync_history(folder: Path) -> dict[str, tuple[int, str]]:
    """Forces the files of a run's history onto the disk. Returns their bytes and SHA-256."""
    digests = {}
    for name in (METRICS_FILE, STARTS_FILE):
        if (data := read_file(folder / name)) is not None:
            fsync(folder / name)
            digests[name] = len(data), sha256_of(data)
    return digests


def archive_history(folder: Path) -> list[str]:
    """Renames the history of a run to `before-1.metrics.jsonl` and so on. Returns the new names."""
    names = METRICS_FILE, STARTS_FILE, SAVED_FILE, TRACKERS_FILE
    there = [name for name in names if os.path.lexists(folder / name)]
    archive_id = next(n for n in count(1) if not any(folder.glob(f"before-{n}.*")))
    for name in there:
        rename(folder / name, folder / f"before-{archive_id}.{name}")
    return [f"before-{archive_id}.{name}" for name in there]
