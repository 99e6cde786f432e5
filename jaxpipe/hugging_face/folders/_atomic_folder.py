"""Writes a folder whole: it has its name only when all of its files are on the disk."""

import errno
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

from ..._durable import PATH_ERRORS, failed_write, fsync_tree, rename
from ..._input import clause
from ...train import RunError

_WRITERS_END_SECONDS = 10.0
_QUIET_CHECKS = 5
_SECONDS_BETWEEN_CHECKS = 0.05


@contextmanager
def atomic_folder(destination: Path) -> Iterator[Path]:
    """Yields a folder to fill, which gets its name at the end: a named folder is complete.

    At `destination` nothing may be, except an empty folder. After an error nothing is left of it.
    """
    destination = Path(os.path.abspath(destination))
    hidden = _hidden_folder(destination)
    try:
        folder = hidden / "new"
        folder.mkdir()
        with _naming_full_disks(destination):
            yield folder
            fsync_tree(folder)
        try:
            rename(folder, destination)  # which replaces an empty folder
        except OSError as error:
            if error.errno not in PATH_ERRORS and error.errno != errno.ENOTEMPTY:
                raise RunError(f"{destination} could not be written: {error.strerror}.") from None
            raise ValueError(
                f"{destination} is there now, which it was not before: another command has made "
                f"it. ({error.strerror}.) Give another folder, or remove it."
            ) from None
    except BaseException:
        _remove_while_writers_end(hidden)
        raise
    shutil.rmtree(hidden, ignore_errors=True)


def _remove_while_writers_end(folder: Path) -> None:
    """Removes a folder until it has been absent for a quarter of a second."""
    # Orbax raises the first error of a save while its other writes go on. One of them may create a
    # file in the folder that is being removed, or create the folder again.
    deadline = time.monotonic() + _WRITERS_END_SECONDS
    num_absent = 0
    while num_absent < _QUIET_CHECKS and time.monotonic() < deadline:
        num_absent = 0 if folder.exists() else num_absent + 1
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_SECONDS_BETWEEN_CHECKS)


def _hidden_folder(destination: Path) -> Path:
    """Makes a temporary folder beside `destination`, which must be free or an empty folder."""
    try:
        is_other = destination.is_symlink() or not destination.is_dir()
        if os.path.lexists(destination) and (is_other or any(destination.iterdir())):
            raise ValueError(f"{destination} is there already. Give another folder, or remove it.")
        destination.parent.mkdir(parents=True, exist_ok=True)
        return Path(mkdtemp(prefix=".converted-", dir=destination.parent))
    except OSError as error:
        raise failed_write(
            f"Nothing can be written to {destination}: {error.strerror}. Give another folder.",
            error,
        ) from None


@contextmanager
def _naming_full_disks(destination: Path) -> Iterator[None]:
    """Raises a RunError for any error but a MemoryError while `destination` is written."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # orbax passes on what the storage below it raises
        what = error.strerror if isinstance(error, OSError) else None
        raise RunError(
            f"{destination} could not be written: {what or clause(error)}. Nothing is left of it. "
            "Make space, or give a folder on another disk."
        ) from error
