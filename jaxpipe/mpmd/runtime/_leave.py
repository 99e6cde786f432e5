"""Lets a process that has ended its script wait for the last steps of the others.

At exit JAX waits for all processes, five minutes long, and then ends every process. A process whose
groups have no more work would so end the others in the middle of a step. The functions of `atexit`
run last in, first out: those of here before those of `jax.distributed`.
"""

import atexit
import functools
import sys
import time

import jax

from ..._compat import distributed_state
from ._rendezvous import kv_get, kv_put
from ._watchdog import POLL_SECONDS, Watchdog, has_pending_items


def wait_at_exit(watchdog: Watchdog, timeout: float) -> None:
    """Makes this process wait at exit for its own work, and `timeout` seconds for its peers."""
    atexit.register(_leave, watchdog, timeout)


def _leave(watchdog: Watchdog, timeout: float) -> None:
    # After an uncaught exception the others may wait for this process: it must not wait for them.
    if hasattr(sys, "last_value") or watchdog.reasons or distributed_state().client is None:
        return
    while has_pending_items(watchdog) and not watchdog.reasons:
        time.sleep(POLL_SECONDS)
    if not watchdog.reasons:
        _wait_for_peers(timeout)


@functools.cache
def _wait_for_peers(timeout: float) -> None:
    """Waits until all processes have come here. Collective, once for each process."""
    kv_put("left", "")
    peers = set(range(jax.process_count())) - {jax.process_index()}
    kv_get("left", peers, timeout)
