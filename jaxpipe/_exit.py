"""How a process ends when others wait for it and it cannot go on: at once, with the reason."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

EXIT_CODE = 70
"""Of a process that cannot go on for a reason outside of it: EX_SOFTWARE of sysexits.h."""

_abort_handlers: list[Callable[[], None]] = []


def leave(code: int = EXIT_CODE) -> NoReturn:
    """Ends the process without waiting for threads, for other processes or for what JAX does at
    exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def before_abort(say: Callable[[], None]) -> None:
    """Calls a function when the C library's `abort` is called, before the process ends.

    JAX calls it as soon as process 0 is gone (`client.h: Terminating process`), from a thread of
    its own. Handlers of the `signal` module would run after the process has ended.

    Args:
        say: What to call, beside all functions given before, in order.
    """
    _abort_handlers.append(say)
    if len(_abort_handlers) > 1:
        return

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def handle(_: int) -> None:
        for handler in _abort_handlers:
            handler()

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))  # for the life of the process
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(signal.SIGABRT, ctypes.cast(handle, ctypes.c_void_p))
