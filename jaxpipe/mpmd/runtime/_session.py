"""Holds the state that programs of a job share: transport, watchdog, and counters of channels.

A process that has ended its script waits for the last steps of the others. At exit JAX waits for
all processes, five minutes long, and then ends every process. A process whose groups have no more
work would so end the others in the middle of a step. A child process of `multiprocessing`, as in
JaxPP's examples, does not even wait: it ends without the functions of `atexit`, and the others lose
what it has not sent.
"""

import atexit
import functools
import itertools
import json
import multiprocessing
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.util import Finalize

import jax
from jax.sharding import PartitionSpec

from ..._compat import distributed_state
from ..._exit import exit_immediately
from ._rendezvous import (
    Transport,
    check_agreement,
    check_same_program,
    kv_get,
    kv_put,
    open_transport,
)
from ._watchdog import POLL_SECONDS, Watchdog, has_pending_items, start_watchdog, stop

START_SECONDS = 3600.0
"""Time to wait for other processes that compile, or that end their last step, in seconds."""

LAST_WORDS_SECONDS = 5.0
"""Time for all processes to fail if one has, in seconds."""


@dataclass(frozen=True)
class Session:
    """One of several processes of a job.

    Attributes:
        channels: Number of channels from one process to another, over all programs.
        programs: Numbers the programs of the job: all processes compile the same ones in the same
            order.
    """

    transport: Transport
    watchdog: Watchdog
    channels: Counter[tuple[int, int]]
    programs: Iterator[int]


@functools.cache
def open_session(timeout: float) -> Session:
    """Returns the session of this process; without progress for `timeout` seconds a step fails."""
    watchdog = start_watchdog(timeout)
    _wait_at_exit(watchdog, START_SECONDS)
    return Session(open_transport(START_SECONDS), watchdog, Counter(), itertools.count())


@dataclass(frozen=True)
class CompileHandshake:
    """Lets processes compare one program that all of them compile, and its shardings."""

    name: str

    def check_program(self, digest: str) -> None:
        """Checks that all processes run the same program."""
        check_same_program(digest, self.name, timeout=START_SECONDS)

    def put_specs(self, index: int, specs: Sequence[PartitionSpec]) -> None:
        """Sends the shardings that this process's compiler chose for an instruction's results."""
        kv_put(f"{self.name}/specs/{index}", json.dumps([list(spec) for spec in specs]))

    def get_specs(self, index: int, process: int) -> list[PartitionSpec]:
        """Returns the shardings that another process's compiler chose for an instruction."""
        what = f"{self.name}/specs/{index}"
        values = kv_get(what, [process], START_SECONDS)
        if process not in values:
            raise TimeoutError(f"Process {process} has not compiled within {START_SECONDS} s.")
        return [
            PartitionSpec(*(tuple(p) if isinstance(p, list) else p for p in spec))
            for spec in json.loads(values[process])
        ]

    def wait_for_all(self, layouts: Mapping[str, str], peers: Iterable[int]) -> None:
        """Waits until every process has compiled, and compares channels with those of `peers`."""
        problem = ""
        try:
            check_agreement(f"{self.name}/channels", layouts, peers, timeout=START_SECONDS)
        except ValueError as error:
            problem = str(error)
        everyone, fact = range(jax.process_count()), {"what travels": problem or "it fits"}
        check_agreement(f"{self.name}/compiled", fact, everyone, timeout=START_SECONDS)
        if problem:  # all say the same
            raise ValueError(problem)


def _wait_at_exit(watchdog: Watchdog, timeout: float) -> None:
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
