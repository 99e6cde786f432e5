"""Turns a step that cannot finish into an error, and ends the process so that peers notice.

Python cannot interrupt a thread that waits for an array. A second thread therefore checks the
pending work fifty times a second, oldest first. Its clock measures how long the same item has been
the oldest: a step may take long, but some item must finish every `timeout` seconds. If none does,
or if an item has failed because its peer is gone, the thread prints the reason on stderr. Then the
main thread raises it if it is in `wait`; otherwise the process ends. Peers notice, and end too.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from ..._exit import exit_immediately, on_abort

POLL_SECONDS = 0.02


@dataclass(eq=False)
class PendingItem:
    """A pending program or transfer; `arrays` is None while it is being dispatched."""

    label: str
    arrays: Sequence[jax.Array] | None = None


class MpmdError(RuntimeError):
    """Error of a step that cannot finish: a peer is gone, or no item has finished for too long."""


@dataclass(frozen=True)
class Watchdog:
    """A running watchdog.

    Attributes:
        timeout: Longest time in which no item finishes, in seconds.
        grace: Time for the main thread to raise, and then to exit, in seconds.
        has_peers: Whether other processes wait for this one.
        thread: The thread that checks the items and ends the process.
        incoming: Items that were dispatched since the last check.
        pending: Items that had not finished at the last check, oldest first.
        reasons: Why the step cannot finish; empty while it can.
        waiting: Events of threads that wait for arrays, set when there is a reason.
    """

    timeout: float
    grace: float
    process: int
    has_peers: bool
    thread: threading.Thread
    incoming: deque[PendingItem] = field(default_factory=deque)
    pending: list[PendingItem] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    waiting: list[threading.Event] = field(default_factory=list)
    raised: threading.Event = field(default_factory=threading.Event)
    stopped: threading.Event = field(default_factory=threading.Event)


def start_watchdog(timeout: float) -> Watchdog:
    """Starts the watchdog of this process.

    `timeout`, in seconds, must be longer than any single program, and longer than a peer may wait
    for the first data of a step.
    """
    if timeout <= 0:
        raise ValueError(f"`timeout` is {timeout}. Give the seconds after which a step is stuck.")
    grace = min(1.0, timeout / 4)
    thread = threading.Thread(
        target=lambda: _watch_pending(watchdog), daemon=True, name="jaxpipe watchdog"
    )
    watchdog = Watchdog(timeout, grace, jax.process_index(), jax.process_count() > 1, thread)
    thread.start()
    return watchdog


def watch(watchdog: Watchdog, label: str) -> PendingItem:
    """Watches an item that is about to be dispatched.

    On CPU the dispatch may last as long as the program. The caller must call `resolve` afterwards,
    also after an exception.
    """
    item = PendingItem(label)
    watchdog.incoming.append(item)
    return item


def resolve(item: PendingItem, arrays: Sequence[jax.Array]) -> None:
    """Sets the arrays of an item, which is watched until they are ready.

    The watchdog holds the arrays until then, so give the smallest result of a program: all of its
    results are ready at the same time. Give none if the dispatch has failed.
    """
    item.arrays = arrays


def wait(watchdog: Watchdog, arrays: Sequence[jax.Array]) -> None:
    """Waits for arrays like `jax.block_until_ready`, but raises if the step cannot finish."""
    if not _are_ready(arrays):
        # A thread of its own waits, as looking a thousand times a second takes 2% of a core.
        ended = threading.Event()
        watchdog.waiting.append(ended)
        thread = threading.Thread(target=_wait_and_set, args=(arrays, ended), daemon=True)
        thread.start()
        try:
            if not watchdog.reasons:  # else nobody sets the event
                ended.wait()
        finally:
            watchdog.waiting.remove(ended)
        if not watchdog.reasons:
            thread.join()  # it holds the arrays until then
    try:
        if not watchdog.reasons:
            jax.block_until_ready(arrays)
            return
    except jax.errors.JaxRuntimeError:
        # An item that this array depends on may have failed: its error says more.
        time.sleep(3 * POLL_SECONDS)
        if not watchdog.reasons:
            raise
    watchdog.raised.set()
    raise MpmdError(watchdog.reasons[0])


def _wait_and_set(arrays: Sequence[jax.Array], ended: threading.Event) -> None:
    """Sets an event when arrays are ready or have failed: whoever waits for it reads which."""
    with contextlib.suppress(Exception):
        jax.block_until_ready(arrays)
    ended.set()


def has_pending_items(watchdog: Watchdog) -> bool:
    """Returns whether a program or a transfer of this process has not finished."""
    return bool(watchdog.incoming or watchdog.pending)


def report_failure(watchdog: Watchdog, error: Exception) -> None:
    """Reports that a step has ended early with an error.

    Peers would wait forever for the remaining data, so if there are any, this process ends after
    some time for the traceback.
    """
    if watchdog.has_peers:
        watchdog.raised.set()
        _report(watchdog, f"{type(error).__name__}: {error}")


def stop(watchdog: Watchdog) -> None:
    """Stops the watchdog, and waits until its thread holds no array."""
    watchdog.stopped.set()
    watchdog.thread.join()


def _watch_pending(watchdog: Watchdog) -> None:
    """Runs the watchdog's thread."""
    if watchdog.has_peers:
        on_abort(lambda: _report_before_abort(watchdog))
    oldest, since = None, 0.0
    while not watchdog.stopped.wait(POLL_SECONDS):
        failure = _poll(watchdog)
        first = watchdog.pending[0] if watchdog.pending else None
        if first is not oldest:
            oldest, since = first, time.monotonic()
        elif first is not None and time.monotonic() - since > watchdog.timeout:
            failure = failure or f"{first.label} has not finished within {watchdog.timeout} seconds"
        if failure and not watchdog.reasons:
            _report(watchdog, failure)
        if watchdog.reasons:
            _end_process(watchdog)
            return


def _poll(watchdog: Watchdog) -> str | None:
    """Removes the items that have finished. Returns the failure of an item, None if none failed."""
    while watchdog.incoming:
        watchdog.pending.append(watchdog.incoming[0])
        watchdog.incoming.popleft()
    finished = [item for item in watchdog.pending if _is_finished(item)]
    # Without peers no other process waits, and the reader of the array sees the error.
    if watchdog.has_peers and any(map(_failure, finished)):
        # A failure spreads to all items that depend on the array, possibly during this check, so
        # check once more, oldest first.
        finished = (item for item in watchdog.pending if _is_finished(item))
        return next(filter(None, map(_failure, finished)), None)
    done = set(map(id, finished))
    watchdog.pending[:] = [item for item in watchdog.pending if id(item) not in done]
    return None


def _report(watchdog: Watchdog, reason: str) -> None:
    watchdog.reasons.append(f"process {watchdog.process}: {reason}")
    try:
        print(f"jaxpipe: {watchdog.reasons[0]}", file=sys.stderr, flush=True)
    finally:  # also without a stderr
        for ended in list(watchdog.waiting):
            ended.set()


def _end_process(watchdog: Watchdog) -> None:
    """Ends the process, unless the main thread has raised the reason and there are no peers."""
    if not watchdog.raised.wait(watchdog.grace):
        faulthandler.dump_traceback(sys.__stderr__ or 2)
    elif watchdog.has_peers:
        # Leaves time for the traceback. At a normal exit JAX would wait five minutes for peers.
        time.sleep(watchdog.grace)
    else:
        return
    exit_immediately()


def _is_finished(item: PendingItem) -> bool:
    return item.arrays is not None and _are_ready(item.arrays)


def _are_ready(arrays: Sequence[jax.Array]) -> bool:
    try:
        return all(array.is_deleted() or _key_data(array).is_ready() for array in arrays)
    except RuntimeError:  # deleted in between
        return False


def _failure(item: PendingItem) -> str | None:
    """Returns the error of arrays that are ready and have failed, None if they have not."""
    for array in item.arrays or ():
        try:
            array.block_until_ready()
        except RuntimeError as error:
            # Donated to the next program: it was fine. Of several shards an array may say so later.
            if not array.is_deleted() and "deleted or donated buffer" not in str(error):
                return f"{item.label} has failed: {_explain(str(error))}"
    return None


def _explain(error: str) -> str:
    first = error.splitlines()[0]
    if "Error while transferring" in first:
        return f"the peer has nothing to send ({first})"
    if "recv()" in first:
        return f"the connection is lost, so the peer has died or left ({first})"
    return first


def _key_data(array: Any) -> Any:
    """Returns the array, or the data of typed keys, which have no `is_ready`."""
    return array if hasattr(array, "is_ready") else jax.random.key_data(array)


def _report_before_abort(watchdog: Watchdog) -> None:
    """Prints the pending item when JAX aborts the process.

    If the watchdog has printed a reason already, this function waits until the watchdog ends the
    process with its own exit code.
    """
    if watchdog.reasons:
        time.sleep(2 * watchdog.grace + 1.0)
        return
    first = [f"{item.label} is under way" for item in watchdog.pending[:1]]
    what = _poll(watchdog) or (first or ["nothing is under way"])[0]
    os.write(2, f"jaxpipe: process {watchdog.process}: {what}, and JAX aborts\n".encode())
