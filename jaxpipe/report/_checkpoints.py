"""The checkpoints of a run as they lie on the disk. Their arrays are not read."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ..train import RunError
from ..train.checkpoint._digests import damage, has_digests, is_complete
from ..train.runtime._reading import is_folder, names_in

_NUMBER = re.compile(r"[0-9]{1,18}(\.|$)")


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
    """Every step in a folder of checkpoints, the newest first; also what was set aside.

    Raises:
        RunError: If the folder cannot be read.
    """
    if not is_folder(folder):
        return []
    steps = [folder / name for name in names_in(folder) if _NUMBER.match(name)]
    found = [_saved(step) for step in steps]
    # A run that goes on may have removed an old step, or renamed a new one, meanwhile.
    found = [saved for saved, step in zip(found, steps, strict=True) if os.path.lexists(step)]
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
    with suppress(OSError):  # of a folder in it that is removed meanwhile, or cannot be read
        for file in step.rglob("*"):
            with suppress(OSError):
                if file.is_file():
                    yield file.stat()


def _state(step: Path, suffix: str) -> str:
    if suffix.startswith("damaged"):
        return "damaged, set aside"
    if suffix.startswith("incomplete"):
        return "incomplete, set aside"
    if suffix:
        return "being written, or left of a killed run"
    try:
        if not is_complete(step):
            return "incomplete"
        if damage(step, quick=True):
            return "damaged"
        return "complete" if has_digests(step) else "complete, without digests"
    except RunError:
        return "cannot be read"
