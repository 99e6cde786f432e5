"""The checkpoints of a run as they lie on the disk. None is read."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from .._input import MOST_JSON_BYTES, parse_json, read_text
from ..train import is_complete


@dataclass(frozen=True)
class Saved:
    """The folder of a step.

    Attributes:
        step: Its number.
        state: `complete`, or why a run would not go on from it.
        num_bytes: Of all its files.
        num_files: How many they are.
        time: When it was written, UTC.
    """

    step: int
    state: str
    num_bytes: int
    num_files: int
    time: datetime


def saved_steps(folder: Path) -> list[Saved]:
    """Every step in a folder of checkpoints, the newest first; also what was set aside."""
    if not folder.is_dir():
        return []
    steps = [step for step in folder.iterdir() if step.name.split(".")[0].isdigit()]
    found = [_saved(step) for step in steps]
    # A run that goes on may have removed an old step, or renamed a new one, meanwhile.
    found = [saved for saved, step in zip(found, steps, strict=True) if step.exists()]
    return sorted(found, key=lambda saved: (-saved.step, saved.state))


def _saved(step: Path) -> Saved:
    number, _, suffix = step.name.partition(".")
    stats = list(_stats(step))
    newest = max((stat.st_mtime for stat in stats), default=0.0)
    return Saved(
        step=int(number),
        state=_state(step, suffix),
        num_bytes=sum(stat.st_size for stat in stats),
        num_files=len(stats),
        time=datetime.fromtimestamp(newest, UTC),
    )


def _stats(step: Path) -> Iterator[os.stat_result]:
    with suppress(FileNotFoundError):  # of a folder in it that is removed meanwhile
        for file in step.rglob("*"):
            with suppress(FileNotFoundError):
                if file.is_file():
                    yield file.stat()


def _state(step: Path, suffix: str) -> str:
    if suffix.startswith("damaged"):
        return "damaged, set aside"
    if suffix.startswith("incomplete"):
        return "incomplete, set aside"
    if suffix:
        return "being written, or left of a killed run"
    if not is_complete(step):
        return "incomplete"
    return "complete" if _has_its_sizes(step) else "damaged"


def _has_its_sizes(step: Path) -> bool:
    """Whether files have the sizes they had when the step was complete, as far as that is known."""
    try:
        file = step / "digests.json"
        if not file.exists():
            return True
        wanted = parse_json(read_text(file, most_bytes=MOST_JSON_BYTES), str(file))
        return all((step / name).stat().st_size == size for name, (size, _) in wanted.items())
    except (OSError, ValueError, TypeError, AttributeError):
        return False
