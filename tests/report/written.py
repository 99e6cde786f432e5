"""Runs as the trainer leaves them, written by hand."""

import json
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import yaml

from jaxpipe import report
from jaxpipe.train import Config, set_up
from jaxpipe.train.checkpoint import write_digests

NOW = datetime(2030, 1, 2, 3, 4, tzinfo=UTC)
SETTINGS: dict[str, Any] = {
    "run_name": "a run",
    "steps": 60,
    "ici_pipeline_parallelism": 4,
    "ici_fsdp_parallelism": 2,
    "num_pipeline_microbatches": 8,
    "per_device_batch_size": 2.0,
}

Metrics = Callable[[int], Mapping[str, Any]]


def usual(step: int) -> dict[str, float]:
    """Metrics of a step of a run where all is well."""
    seconds = 30.0 if step == 1 else 0.5 + 0.01 * math.sin(step)
    return {
        "loss": 2 + 4 / step,
        "accuracy": 1 - 1 / step,
        "gradient_norm": 1 + 1 / step,
        "learning_rate": 1e-3,
        "step_time_seconds": seconds,
        "tokens_per_second": 2048 / seconds,
    }


def write_run(
    folder: Path, *, settings: Mapping[str, Any] | None = None, metrics: Metrics = usual,
    steps: int = 60,
) -> Path:  # fmt: skip
    """The folder of a run with that many steps done."""
    folder.mkdir(parents=True, exist_ok=True)
    config = Config.model_validate(SETTINGS | dict(settings or {}))
    (folder / "config.yml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    lines = (json.dumps({"step": step, **metrics(step)}) for step in range(1, steps + 1))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def write_starts(folder: Path, *starts: Mapping[str, Any]) -> None:
    known = {"num_devices": 8, "num_processes": 1, "device_kind": "cpu", "repeated_steps": 0}
    lines = (json.dumps({"time": "2030-01-01T00:00:00+00:00"} | known | dict(s)) for s in starts)
    (folder / "starts.jsonl").write_text("\n".join(lines) + "\n")


def write_checkpoint(folder: Path, name: str, *, complete: bool = True) -> Path:
    """The folder of a step with one file."""
    step = folder / "checkpoints" / name
    step.mkdir(parents=True)
    (step / "state").write_text("x" * 2500)
    if complete:
        (step / "_CHECKPOINT_METADATA").touch()
        write_digests(step, int(name.split(".")[0]))
    return step


def page_of(folder: Path, *, now: datetime = NOW) -> str:
    """The page, with the run planned on the devices of the tests."""
    run = report.read_run(folder)
    setup = None
    if run.config is not None:
        setup = set_up(run.config, jax.devices()[: run.num_devices])
    return report.render(run, setup, now=now, why_no_setup="Unknown.")
