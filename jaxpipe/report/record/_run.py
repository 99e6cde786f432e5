"""Reads the folder of a run, and lists its checkpoints without reading their arrays."""

import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..._input import read_text
from ...sharding import AXES
from ...train import Config, RunError, read_metrics
from ...train.checkpoint import find_corruption, has_digests, is_complete
from ...train.config import MAX_YAML_BYTES, load_yaml
from ...train.loop import read_starts
from ...train.runtime import is_folder, list_names
from ._series import Series, to_series

_NUMBER = re.compile(r"[0-9]{1,18}(\.|$)")
Values = dict[str, Any]


@dataclass(frozen=True)
class SavedStep:
    """The folder of a saved step."""

    step: int
    state: str  # `complete`, or the reason why a run would not resume from it
    num_bytes: int  # bytes of all its files
    num_files: int
    time: datetime  # the time at which it was written, UTC


def saved_steps(folder: Path) -> list[SavedStep]:
    """Lists every step in a folder of checkpoints, also quarantined ones, the newest first."""
    if not is_folder(folder):
        return []
    steps = [folder / name for name in list_names(folder) if _NUMBER.match(name)]
    listed = [_saved(step) for step in steps]
    # A run that is still going may have removed or renamed a step meanwhile.
    listed = [saved for saved, step in zip(listed, steps, strict=True) if os.path.lexists(step)]
    return sorted(listed, key=lambda saved: (-saved.step, saved.state))


def _saved(step: Path) -> SavedStep:
    step_text, _, suffix = step.name.partition(".")
    stats = list(_stats(step))
    newest = max((stat.st_mtime for stat in stats), default=0.0)
    return SavedStep(
        step=int(step_text),
        state=_state(step, suffix),
        num_bytes=sum(stat.st_size for stat in stats),
        num_files=len(stats),
        time=datetime.fromtimestamp(newest, UTC),
    )


def _stats(step: Path) -> Iterator[os.stat_result]:
    with suppress(OSError):  # a folder in it is removed meanwhile, or cannot be read
        for file in step.rglob("*"):
            with suppress(OSError):
                if file.is_file():
                    yield file.stat()


def _state(step: Path, suffix: str) -> str:
    if suffix.startswith("damaged"):
        return "corrupt, quarantined"
    if suffix.startswith("incomplete"):
        return "incomplete, quarantined"
    if suffix:
        return "being written, or left of a killed run"
    try:
        if not is_complete(step):
            return "incomplete"
        if find_corruption(step, quick=True):
            return "corrupt"
        return "complete" if has_digests(step) else "complete, without digests"
    except RunError:
        return "cannot be read"


@dataclass(frozen=True)
class RunRecord:
    """A run, read from its folder."""

    folder: Path
    values: Values  # the values of `config.yml`, unchecked
    config: Config | None  # the checked config; None if this version cannot read it
    problem: str  # the reason why it cannot, or ""
    steps: list[int]  # the step of each line of `metrics.jsonl`, in order
    series: dict[str, Series]  # every metric by its name
    # The times and devices of each start of the run; empty for runs of old versions.
    starts: list[Values]
    saved: list[SavedStep]  # its checkpoints, also quarantined ones
    traces: list[Path]  # the files that `mpmd_trace_step` wrote
    profile: Path | None  # the folder of a profile, if one exists
    written: float  # the time of the newest line of metrics, in seconds since 1970

    @property
    def name(self) -> str:
        return str(self.values.get("run_name", self.folder.name))

    @property
    def wanted_steps(self) -> int:
        """Steps of the whole run."""
        num_steps = self.values.get("steps")
        return num_steps if isinstance(num_steps, int) else self.steps[-1]

    @property
    def num_devices(self) -> int | None:
        """Devices of all processes, as recorded or else by the mesh sizes; None if unknown."""
        recorded = self.starts[-1].get("num_devices") if self.starts else None
        if isinstance(recorded, int):
            return recorded
        kinds = ("ici", "dcn")
        names = ["pipeline" if axis == "stage" else axis for axis in AXES]
        sizes = [
            self.values.get(f"{kind}_{name}_parallelism", 1) for kind in kinds for name in names
        ]
        are_known = all(isinstance(size, int) and size > 0 for size in sizes)
        return math.prod(sizes) if are_known else None


def read_run(folder: Path) -> RunRecord:
    """Reads a run that has ended or is still going.

    Args:
        folder: The folder of the run, `output_dir/run_name`.

    Returns:
        The settings, metrics, starts and checkpoints of the run.

    Raises:
        ValueError: If it is no folder of a run, has no step yet, or has a broken file.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder. Give that of a run: `output_dir/run_name`.")
    file = folder / "metrics.jsonl"
    for needed in (folder / "config.yml", file):
        if not needed.is_file():
            raise ValueError(
                f"{folder} has no {needed.name}. Give the folder of a run: `output_dir/run_name`."
            )
    entries = read_metrics(file)
    if not entries:
        raise ValueError(f"{file} has no line yet. Wait until the run's first step has ended.")
    values = _config_values(folder / "config.yml")
    config, problem = _checked(values)
    profile = folder / "profile"
    steps, series = to_series(entries, str(file))
    return RunRecord(
        folder=folder,
        values=values,
        config=config,
        problem=problem,
        steps=steps,
        series=series,
        starts=read_starts(folder),
        saved=saved_steps(folder / "checkpoints"),
        traces=sorted(folder.glob("trace_*.json")),
        profile=profile if profile.is_dir() else None,
        written=file.stat().st_mtime,
    )


def _config_values(file: Path) -> Values:
    values = load_yaml(read_text(file, most_bytes=MAX_YAML_BYTES), str(file))
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds no `key: value` lines.")
    return {str(key): value for key, value in values.items()}


def _checked(values: Values) -> tuple[Config | None, str]:
    """Returns the config, without keys of other versions, or None and why it is refused."""
    keys = Config.model_fields.keys() - {"run_name"}
    supported = {key: value for key, value in values.items() if key in keys}
    try:
        return Config.model_validate(supported), ""
    except ValueError as error:
        return None, str(error)
