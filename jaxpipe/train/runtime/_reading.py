"""Reads files of a run that another process or an earlier start has written.

A file that exists and cannot be read is neither missing nor corrupt. It raises an error, so that no
decision is based on it.
"""

import errno
import math
import os
import stat
from pathlib import Path

from ._stop import RunError

_DOES_NOT_EXIST = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""Error numbers which mean that the file does not exist. Others leave open whether it does."""


class UnreadableError(RunError):
    """A file or a folder exists and cannot be read, which is not a sign of damage."""

    def __init__(self, path: Path, error: OSError) -> None:
        """Writes the message."""
        super().__init__(
            f"{error.filename or path} cannot be read: {error.strerror}. This is not taken for "
            "damage, and nothing has been changed. Make it readable, and start again."
        )


def stat_or_none(path: Path) -> os.stat_result | None:
    """Returns the `os.stat` of a path, None if it does not exist."""
    try:
        return os.stat(path)
    except OSError as error:
        if error.errno in _DOES_NOT_EXIST:
            return None
        raise UnreadableError(path, error) from error


def is_file(path: Path) -> bool:
    """Returns whether a path is a regular file, and not a folder, a device or a pipe."""
    status = stat_or_none(path)
    return status is not None and stat.S_ISREG(status.st_mode)


def is_folder(path: Path) -> bool:
    """Returns whether a path is a folder."""
    status = stat_or_none(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def read_file(path: Path, *, most_bytes: int | float = math.inf) -> bytes | None:
    """Returns the content of a file, None if it does not exist."""
    status = stat_or_none(path)
    if status is None and not os.path.lexists(path):
        return None
    if status is None or not is_file(path):
        raise ValueError(f"{path} is not a regular file. Move it away, and put the file back.")
    if status.st_size > most_bytes:
        raise ValueError(
            f"{path} has {status.st_size:,} bytes, more than {most_bytes:,}. Move it away."
        )
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnreadableError(path, error) from error


def list_names(folder: Path) -> list[str]:
    """Returns the names of the entries of a folder, sorted; none if it does not exist."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        if error.errno in _DOES_NOT_EXIST:
            return []
        raise UnreadableError(folder, error) from error
