"""Lets a process that has ended its script wait for the last steps of the others.

At exit JAX waits for all processes, five minutes long, and then ends every process. A process whose
groups have no more work would so end the others in the middle of a step. A child process of
`multiprocessing`, as in JaxPP's examples, does not even wait: it ends without the functions of
`atexit`, and the others lose what it has not sent.
"""

import atexit
import functools
import multiprocessing
import signal
import sys
import time
from multiprocessing.util import Finalize

import jax

from ..._compat import distributed_state
from ..._exit import exit_immediately
from ._rendezvous import kv_get, kv_put
from ._watchdog import POLL_SECONDS, Watchdog, has_pending_items, stop

LAST_WORDS_SECONDS = 5.0
"""Time for all processes to fail if one has, in seconds."""


def wait_at_exit(watchdog: Watchdog, timeout: float) -> None:
    """Makes this process wait at exit for its own work, and `timeout` seconds for its peers."""
    if multiprocessing.parent_process() is None:
        # The functions run last in, first out: this one before that of `jax.distributed`.
        atexit.register(_leave_as_main, watchdog, timeout)
    else:
        Finalize(None, _leave_as_child, (watchdog, timeout), exitpriority=0)


def _leave_as_main(watchdog: Watchdog, timeout: float) -> None:
    if _has_failed(watchdog) and distributed_state().client is not None:
        # The traceback is printed. Even without its function of `atexit` JAX would wait for the
        # others, in a destructor, and they for what this process has not sent. Others may have the
        # same error, which they have no time to print once process 0 is gone.
        try:
            _wait_for_peers(LAST_WORDS_SECONDS)
            time.sleep(watchdog.grace if watchdog.process == 0 else 0.0)
        finally:
            interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
            exit_immediately(128 + signal.SIGINT if interrupted else 1)
    _leave(watchdog, timeout)


def _leave_as_child(watchdog: Watchdog, timeout: float) -> None:
    _leave(watchdog, timeout)
    if not _has_failed(watchdog) and distributed_state().client is not None:
        jax.distributed.shutdown()


def _leave(watchdog: Watchdog, timeout: float) -> None:
    # After an uncaught exception the others may wait for this process: it must not wait for them.
    if _has_failed(watchdog):
        return
    while has_pending_items(watchdog) and not watchdog.reasons:
        time.sleep(POLL_SECONDS)
    if watchdog.reasons:
        return
    if distributed_state().client is not None:
        _wait_for_peers(timeout)
    # Whoever frees an array gives up the GIL. A thread that wants it back while Python ends is
    # ended inside of C++, which aborts: https://docs.python.org/3.13/c-api/init.html#c.PyGILState_Ensure
    stop(watchdog)


def _has_failed(watchdog: Watchdog) -> bool:
    """Returns whether an exception that is not caught, or the watchdog, ends this process.

    `sys.exit(1)` in a main process leaves no trace that can be read here.
    """
    error = sys.exc_info()[1]  # in a child process, which calls this while the exception passes
    exits = isinstance(error, SystemExit) and not error.code
    uncaught = hasattr(sys, "last_value") or not (error is None or exits)
    return uncaught or bool(watchdog.reasons)


@functools.cache
def _wait_for_peers(timeout: float) -> None:
    """Waits until all processes have come here. Collective, once for each process."""
    kv_put("left", "")
    peers = set(range(jax.process_count())) - {jax.process_index()}
    kv_get("left", peers, timeout)
