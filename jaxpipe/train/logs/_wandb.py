"""Metrics to Weights & Biases, if it is installed."""

import importlib
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..._durable import write_file
from ._metrics import WriteMetrics


def load_wandb() -> Any:
    """Imports `wandb`."""
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise ValueError(
            f"`enable_wandb` is true, and wandb cannot be imported ({error}). `pip install wandb`, "
            "or leave `enable_wandb` at false."
        ) from error


@contextmanager
def wandb_writer(
    folder: Path, *, project: str, name: str, settings: Mapping[str, Any]
) -> Iterator[WriteMetrics]:
    """Yields a function that logs the metrics of a step to Weights & Biases.

    A run that is resumed in its folder is resumed there too. Steps that are repeated after a kill
    keep their first values there.
    """
    file = folder / "wandb_id"
    if not file.exists():
        write_file(file, secrets.token_hex(8))
    run = load_wandb().init(
        project=project,
        name=name,
        id=file.read_text(encoding="utf-8"),
        resume="allow",
        dir=str(folder),
        config=dict(settings),
    )

    def write(step: int, metrics: Mapping[str, float]) -> None:
        run.log(dict(metrics), step=step)

    try:
        yield write
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()
