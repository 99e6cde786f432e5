"""Locks the folder of a run, so that one run at a time writes there, and names failed disks."""

import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ._multihost import broadcast_from_first, is_first_process
from ._stop import RunError

LOCK_FILE = "lock"
"""The file that a run locks until it ends. It names the process that holds the lock."""

_DISK_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM),
    *(errno.ESTALE, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EEXIST, errno.ENOTEMPTY),
)

_Result = TypeVar("_Result")


@contextmanager
def locked_run_folder(path: Path) -> Iterator[None]:
    """Makes the folder of a run, and keeps other runs out; if it cannot, all processes raise."""
    held = on_first_process(lambda: _lock(path), f"cannot have {str(path)!r} for this run")
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        name = repr(error.filename) if error.filename else f"A file in {str(path)!r}"
        raise RunError(
            f"{name} could not be read or written: {error.strerror}. Checkpoints that were "
            "complete still are. Make space, or choose another `output_dir`, and start again."
        ) from error
    finally:
        if held is not None:
            os.close(held)


def on_first_process(action: Callable[[], _Result], failure: str) -> _Result | None:
    """Runs an action on the first process. Collective: every process must call it."""
    result, problem = None, None
    if is_first_process():
        try:
            result = action()
        except (ValueError, RunError) as error:
            problem = error
        except OSError as error:
            name = error.filename or "A file of the run"
            problem = RunError(f"{name} could not be read or written: {error.strerror}.")
    kind = broadcast_from_first(
        0 if problem is None else 1 if isinstance(problem, ValueError) else 2
    )
    if problem is not None:
        raise problem
    if kind:
        raise (ValueError if kind == 1 else RunError)(f"Process 0 {failure}: see its error.")
    return result


def _lock(path: Path) -> int:
    """Locks the folder of a run. Returns the descriptor that holds the lock until closed."""
    descriptor = None
    try:
        path.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # which a pipe would do
        descriptor = os.open(path / LOCK_FILE, flags, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except BlockingIOError:
        assert descriptor is not None, "only the lock blocks"
        owner = os.pread(descriptor, 200, 0).decode("utf-8", "replace") or "another process"
        os.close(descriptor)
        raise ValueError(
            f"{str(path)!r} belongs to a run that goes on: {owner} writes there. Wait for it, end "
            "it, or choose another `run_name`."
        ) from None
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        if (path / LOCK_FILE).is_symlink():
            raise ValueError(
                f"{str(path / LOCK_FILE)!r} is a symbolic link, and what it points to is not "
                "written. Remove it, or choose another `run_name`."
            ) from None
        raise ValueError(
            f"Nothing can be {'locked in' if _has_no_locks(error) else 'written to'} {str(path)!r} "
            f"(`output_dir`/`run_name`): {error.strerror}. Choose another `output_dir`, or "
            f"{'mount this one with locks' if _has_no_locks(error) else 'change this one'}."
        ) from None
    return descriptor


def _has_no_locks(error: OSError) -> bool:
    return error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
