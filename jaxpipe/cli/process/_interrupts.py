"""Handles Ctrl-C: the command ends with one line, also while its main thread compiles."""

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 128 + signal.SIGINT
"""The exit code of a command that SIGINT has ended, as in shells."""
CLEANUP_SECONDS = 3.0
"""How long an interrupted command may take to remove its unfinished files."""

_said, _printed = threading.Lock(), threading.Event()
_unwinds, _interrupted = threading.Event(), threading.Event()


def watch_interrupts() -> None:
    """Ends this process when SIGINT comes, whatever its main thread does."""
    # Python runs signal handlers between two bytecodes of the main thread, which may be inside
    # XLA's compiler for minutes; and an import or a callback may turn an exception into another
    # one. So the signal handler of the C level writes the signal into a pipe, and a thread that
    # reads the pipe ends the process: at once, or, inside `unwinding`, after `CLEANUP_SECONDS`. A
    # run that has made a step handles SIGINT itself: only a second one ends it here.
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return  # ignored, as in the background of a shell without job control
    signal.signal(signal.SIGINT, _interrupt)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_read, args=(reader,), daemon=True, name="interrupts").start()


@contextmanager
def unwinding() -> Iterator[None]:
    """Lets SIGINT, and errors that it causes, raise KeyboardInterrupt: files are then removed."""
    _unwinds.set()
    try:
        yield
    except Exception:
        if _interrupted.is_set():
            raise KeyboardInterrupt from None
        raise
    finally:
        _unwinds.clear()


def _interrupt(signum: int, frame: object) -> None:
    del signum, frame
    if _unwinds.is_set():
        _interrupted.set()
        raise KeyboardInterrupt


def say_interrupted() -> int:
    """Prints, the first time, that SIGINT has ended the command, and returns the exit code."""
    if _said.acquire(blocking=False):
        print("jaxpipe: interrupted (SIGINT)", file=sys.stderr, flush=True)
        _printed.set()
    _printed.wait(1.0)  # the caller ends the process, where another thread may be printing
    return INTERRUPTED


def _read(reader: int) -> None:
    count, seconds = 0, None
    while True:
        ready, _, _ = select.select([reader], [], [], seconds)
        count += os.read(reader, 64).count(signal.SIGINT) if ready else 0
        is_over = not ready or count > 1
        if is_over:
            os._exit(say_interrupted())
        if count and signal.getsignal(signal.SIGINT) is _interrupt:
            if not _unwinds.is_set():
                os._exit(say_interrupted())
            seconds = CLEANUP_SECONDS
