"""Reading what another process or another start has written. What is there and cannot be read is
neither missing nor damaged: nobody knows, so nothing is decided by it."""

import errno
import math
import os
import stat
from pathlib import Path

from ._stop import RunError

_NOT_SO = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""Errors that say what is not there, or is something else. All others say that it is unknown."""


class UnreadableError(RunError):
    """A file or a folder is there and cannot be read, which is no sign of damage."""

    def __init__(self, path: Path, error: OSError) -> None:
        """
        Args:
            path: The file or folder.
            error: What the system says.
        """
        super().__init__(
            f"{error.filename or path} cannot be read: {error.strerror}. This is not taken for "
            "damage, and nothing has been changed. Make it readable, and start again."
        )


def status(path: Path) -> os.stat_result | None:
    """What the system says of a path; None if nothing is there.

    Raises:
        UnreadableError: If it cannot say.
    """
    try:
        return os.stat(path)
    except OSError as error:
        if error.errno in _NOT_SO:
            return None
        raise UnreadableError(path, error) from error


def is_file(path: Path) -> bool:
    """Whether a regular file is there: no folder, and no pipe that would never end.

    Raises:
        UnreadableError: If the system cannot say.
    """
    found = status(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def is_folder(path: Path) -> bool:
    """Whether a folder is there.

    Raises:
        UnreadableError: If the system cannot say.
    """
    found = status(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def read_file(path: Path, *, most_bytes: int | float = math.inf) -> bytes | None:
    """What a file holds; None if there is no such file.

    Raises:
        UnreadableError: If it cannot be read.
        ValueError: If something else has its name, or it has more bytes.
    """
    found = status(path)
    if found is None and not os.path.lexists(path):
        return None
    if found is None or not is_file(path):
        raise ValueError(f"{path} is no file. Move it away, and put the file back.")
    if found.st_size > most_bytes:
        raise ValueError(f"{path} has {found.st_size:,} bytes, more than {most_bytes:,}.")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnreadableError(path, error) from error


def names_in(folder: Path) -> list[str]:
    """The names of what is in a folder, in order; none if it is not there.

    Raises:
        UnreadableError: If it cannot be read.
    """
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        if error.errno in _NOT_SO:
            return []
        raise UnreadableError(folder, error) from error
