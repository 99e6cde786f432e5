"""Ends a process that cannot continue while others wait for it, at once and with the reason."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

EXIT_CODE = 70
"""Exit code of a process that fails because another one failed: EX_SOFTWARE of sysexits.h."""

_abort_callbacks: list[Callable[[], None]] = []


def exit_immediately(code: int = EXIT_CODE) -> NoReturn:
    """Ends the process without waiting for threads, other processes or JAX's exit handlers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def on_abort(say: Callable[[], None]) -> None:
    """Registers a function that runs, after those registered before, when C's `abort` is called."""
    # JAX calls `abort` as soon as process 0 is gone (`client.h: Terminating process`), from its own
    # thread. Handlers of the `signal` module would run after the process has ended.
    _abort_callbacks.append(say)
    if len(_abort_callbacks) > 1:
        return

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def handle(_: int) -> None:
        for handler in _abort_callbacks:
            handler()

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))  # for the life of the process
    libc = ctypes.CDLL(None)
    # System V's `signal` calls a handler once. While Python ends, this one would abort again.
    set_handler = getattr(libc, "sysv_signal", libc.signal)  # macOS has the latter alone
    set_handler.argtypes = (ctypes.c_int, ctypes.c_void_p)
    set_handler(signal.SIGABRT, ctypes.cast(handle, ctypes.c_void_p))
