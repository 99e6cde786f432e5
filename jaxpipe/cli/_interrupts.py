"""Ctrl-C: a command that it ends says so in one line, also while its main thread compiles."""

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 128 + signal.SIGINT
"""The exit code of a command that SIGINT has ended, as shells have it."""
CLEANUP_SECONDS = 3.0
"""How long an interrupted command has for removing what it has not finished."""

_said = threading.Lock()
_interrupted = threading.Event()


def watch_interrupts() -> None:
    """Ends this process soon after a first SIGINT, and at once after a second one.

    Python runs signal handlers between two bytecodes of the main thread, which may be inside XLA's
    compiler for minutes. The operating system's own handler also writes the signal into a pipe,
    which a thread reads. A run that has made a step handles SIGINT itself: it ends after its step,
    and only a second SIGINT ends it here.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return  # ignored, as in the background of a shell without job control
    signal.signal(signal.SIGINT, _interrupt)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_read, args=(reader,), daemon=True, name="interrupts").start()


@contextmanager
def interruptible() -> Iterator[None]:
    """Raises KeyboardInterrupt in place of any error that an interrupt has caused.

    Code that it breaks off may raise something else, as an import does of a module that is not
    there as a whole.
    """
    try:
        yield
    except Exception:
        if _interrupted.is_set():
            raise KeyboardInterrupt from None
        raise


def _interrupt(number: int, frame: object) -> None:
    del number, frame
    _interrupted.set()
    raise KeyboardInterrupt


def say_interrupted() -> int:
    """Says once that SIGINT has ended the command. Returns its exit code."""
    if _said.acquire(blocking=False):
        print("jaxpipe: interrupted (SIGINT)", file=sys.stderr, flush=True)
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
            seconds = CLEANUP_SECONDS
