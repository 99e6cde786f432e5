"""The folder of a run: one run at a time writes there, and a disk that fails ends it by name."""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ._stop import RunError
from ._together import agreed, is_first

LOCK = "lock"
"""Held while a run goes on, and let go by the system however that ends. Names who has it."""

_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES)


@contextmanager
def run_folder(path: Path) -> Iterator[None]:
    """Makes the folder of a run and keeps other runs out of it until this one ends.

    Of several processes the first does so; if it cannot, all of them raise.

    Raises:
        ValueError: If nothing can be written there, or another run has it.
        RunError: If the disk fails while the run goes on.
    """
    problem, held = None, None
    if is_first():
        try:
            held = _locked(path)
        except ValueError as error:
            problem = error
    if not agreed(int(problem is None)) and problem is None:
        problem = ValueError(f"Process 0 cannot have {str(path)!r} for this run; it says why.")
    if problem is not None:
        raise problem
    try:
        yield
    except OSError as error:
        if error.errno not in _OF_DISKS:
            raise
        name = repr(error.filename) if error.filename else f"A file in {str(path)!r}"
        raise RunError(
            f"{name} could not be read or written: {error.strerror}. Checkpoints that were "
            "complete still are. Make space, or choose another `output_dir`, and start again."
        ) from error
    finally:
        if held is not None:
            os.close(held)


def _locked(path: Path) -> int:
    """The descriptor that holds the lock until it is closed."""
    descriptor = None
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
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
        raise ValueError(
            f"Nothing can be {'locked in' if _has_no_locks(error) else 'written to'} {str(path)!r} "
            f"(`output_dir`/`run_name`): {error.strerror}. Choose another `output_dir`, or "
            f"{'mount this one with locks' if _has_no_locks(error) else 'change this one'}."
        ) from None
    return descriptor


def _has_no_locks(error: OSError) -> bool:
    return error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
