"""Writes files that a power loss cannot tear: afterwards a file has its old or its new content.

A file is written under another name, forced onto the disk, and renamed, and then its folder is
forced onto the disk too. A symbolic link is replaced by the new file, and not followed.
"""

import errno
import os
from contextlib import suppress
from pathlib import Path

_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM)
"""Errors where the file system cannot force a folder onto the disk, or this user may not."""


def write_file(path: Path, content: str | bytes) -> None:
    """Writes a file whole. A file of this name is replaced.

    Args:
        path: The file.
        content: The new content. Text is written as UTF-8.

    Raises:
        OSError: If the file cannot be written. The error names `path`, not the temporary file.
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
            os.fsync(file.fileno())
        os.replace(new, path)
        sync(path.parent)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise type(error)(error.errno, error.strerror, str(path)) from error


def rename(source: Path, destination: Path) -> None:
    """Renames a file or a folder whose content is on the disk already, and makes that durable.

    Args:
        source: The file or folder.
        destination: The new path.

    Raises:
        OSError: If the system refuses to rename it.
    """
    os.rename(source, destination)
    sync(destination.parent)


def sync(path: Path) -> None:
    """Forces a file or a folder onto the disk, as far as the file system can.

    Args:
        path: The file or folder.

    Raises:
        OSError: If it cannot be opened, or the disk fails.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


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
