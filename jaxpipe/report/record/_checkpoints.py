"""Lists the checkpoints of a run, without reading their arrays."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ...train import RunError
from ...train.checkpoint import find_corruption, has_digests, is_complete
from ...train.runtime import is_folder, list_names

_NUMBER = re.compile(r"[0-9]{1,18}(\.|$)")


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
