"""Writes files that a power loss cannot tear: afterwards a file has its old or its new content.

A file is written under another name, forced onto the disk, and renamed, and then its folder is
forced onto the disk too. A symbolic link is replaced by the new file, and not followed.
"""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

_UNSUPPORTED_SYNC = (
    *(errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS),
    *(errno.EBADF, errno.EACCES, errno.EPERM),
)
"""Error numbers of `fsync` where the file system does not have it for such a file, or this user may
not call it. Nothing more can be done there. Others, such as EIO, mean that the disk has failed."""

PATH_ERRORS = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENXIO, errno.EINVAL),
)
"""Error numbers of an `OSError` that mean that the user gave a wrong path."""


class DiskError(RuntimeError):
    """A file could not be written, and its path is not the reason: the disk is full, or fails."""


def failed_write(message: str, error: OSError) -> ValueError | DiskError:
    """Returns the error of a file that could not be written: ValueError if its path is wrong.

    Args:
        message: What the error says.
        error: The error of the operating system.

    Returns:
        The error, to be raised.
    """
    return (ValueError if error.errno in PATH_ERRORS else DiskError)(message)


def write_file(path: Path, content: str | bytes) -> None:
    """Writes a file whole. A file of this name is replaced.

    Args:
        path: The file.
        content: The new content. Text is written as UTF-8.

    Raises:
        OSError: If the file cannot be written. The error names `path`, not the temporary file. The
            file has its old content then; only if the disk fails while the folder is forced onto
            it, the file may have either content, and a power loss may bring back the old one.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    new = path.with_name(f".{path.name}.new")
    try:
        with suppress(FileNotFoundError):
            new.unlink()  # left by a killed process, or a link that another user made
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(new, flags, 0o666), "wb") as file:
            file.write(data)
            file.flush()
            _force(file.fileno())
        os.replace(new, path)
        sync(path.parent)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise type(error)(error.errno, error.strerror, str(path)) from error


def write_output(path: Path, content: str) -> None:
    """Writes what a user has asked for: a file whole, as `write_file` does, or to a device or pipe.

    Args:
        path: The file, device or pipe. Links are followed.
        content: The content, written as UTF-8.

    Raises:
        OSError: If it cannot be written, or `path` is a pipe that nobody reads. A file has its old
            content then.
    """
    try:
        is_regular = stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        is_regular = True
    if is_regular:
        write_file(Path(os.path.realpath(path)), content)
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # of a pipe it would wait for a reader
    os.set_blocking(descriptor, True)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(content)


def rename(source: Path, destination: Path) -> None:
    """Renames a file or a folder whose content is on the disk already, and makes that durable.

    Args:
        source: The file or folder.
        destination: The new path.

    Raises:
        OSError: If the system refuses to rename it, or the disk fails while the folder is forced
            onto it. In the second case it has been renamed.
    """
    os.rename(source, destination)
    sync(destination.parent)


def sync(path: Path) -> None:
    """Forces a file or a folder onto the disk, as far as the file system can.

    Args:
        path: The file or folder. A folder that this user may write to and not read stays as it is:
            it can be forced onto the disk only by who can open it.

    Raises:
        OSError: If a file cannot be opened, or the disk fails. The error names `path`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():
            return
        raise
    try:
        _force(descriptor)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def _force(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED_SYNC:
            raise


def sync_tree(folder: Path) -> None:
    """Forces a folder and everything in it onto the disk.

    Args:
        folder: The folder.

    Raises:
        OSError: If a file cannot be opened, or the disk fails.
    """
    for inner, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(inner, name))
        sync(Path(inner))
