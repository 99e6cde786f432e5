"""Reads the folder of a run."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._input import read_text
from ...sharding import AXES
from ...train import Config, read_metrics
from ...train.config import MAX_YAML_BYTES, load_yaml
from ...train.loop import read_starts
from ._checkpoints import SavedStep, saved_steps
from ._series import Series, to_series

Values = dict[str, Any]


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
