"""Files that power loss cannot tear: after it a file is as it was before, or as it was to be.

A file is written under another name, forced onto the disk, and renamed, and then its folder is
forced onto the disk too. Symbolic links are replaced by what is written, and not followed.
"""

import errno
import os
from contextlib import suppress
from pathlib import Path

_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM)
"""What file systems answer that cannot force a folder onto the disk, or a reader who may not."""


def write_file(path: Path, content: str | bytes) -> None:
    """Replaces a file, or makes it.

    Args:
        path: The file.
        content: All of it; text is written as UTF-8.

    Raises:
        OSError: With the name of the file, which is then as it was before.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    new = path.with_name(f".{path.name}.new")
    try:
        with suppress(FileNotFoundError):
            new.unlink()  # what a killed process left, or a link that somebody else put there
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
    """Renames a file or a folder whose content is on the disk already."""
    os.rename(source, destination)
    sync(destination.parent)


def sync(path: Path) -> None:
    """Forces a file or a folder onto the disk, as far as the file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Forces a folder with all that is in it onto the disk."""
    for inner, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(inner, name))
        sync(Path(inner))
