"""Writes files that a power loss cannot corrupt: afterwards a file has its old or its new content.

A file is written under a temporary name, flushed to the disk and renamed; then its folder is
flushed to the disk too. A symbolic link is replaced by the new file, and not followed.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_UNSUPPORTED_SYNC = (
    *(errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS),
    *(errno.EBADF, errno.EACCES, errno.EPERM),
)
"""Error numbers of `fsync` if the file system does not support it for this file, or this user may
not call it. These are ignored. Other errors, such as EIO, mean that the disk has failed."""

PATH_ERRORS = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENXIO, errno.EINVAL),
)
"""Error numbers of an `OSError` which mean that the user gave a wrong path."""


class DiskError(RuntimeError):
    """Error of a file that could not be written because the disk is full or fails."""


def failed_write(message: str, error: OSError) -> ValueError | DiskError:
    """Returns the error of a failed write: `ValueError` if the path is wrong, else `DiskError`."""
    return (ValueError if error.errno in PATH_ERRORS else DiskError)(message)


@contextmanager
def failing_writes(what: str, advice: str) -> Iterator[None]:
    """Raises `failed_write` for an OSError inside: `what` failed, the system's reason, `advice`."""
    try:
        yield
    except OSError as error:
        raise failed_write(f"{what}: {error.strerror}. {advice}", error) from None


def write_file(path: Path, content: str | bytes) -> None:
    """Writes a whole file, and replaces a file of this name.

    After an OSError, which names `path`, the file has its old content. Only if the disk fails while
    the folder is flushed, it may have either content, and a power loss may restore the old one.
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
        fsync(path.parent)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise type(error)(error.errno, error.strerror, str(path)) from error


def write_output(path: Path, content: str) -> None:
    """Writes an output that the user asked for to a file (as `write_file`), a device or a pipe."""
    try:
        is_regular = stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        is_regular = True
    if is_regular:
        write_file(Path(os.path.realpath(path)), content)
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # else a pipe waits for a reader
    os.set_blocking(descriptor, True)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(content)


def rename(source: Path, destination: Path) -> None:
    """Renames a file or a folder that is on the disk so that the new name survives a power loss."""
    os.rename(source, destination)
    fsync(destination.parent)


def fsync(path: Path) -> None:
    """Flushes a file or a folder to the disk, as far as the file system can."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():  # only a user who can open a folder can flush it
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


def fsync_tree(folder: Path) -> None:
    """Flushes a folder and all its files and folders to the disk."""
    for inner, _, names in os.walk(folder, topdown=False):
        for name in names:
            fsync(Path(inner, name))
        fsync(Path(inner))
