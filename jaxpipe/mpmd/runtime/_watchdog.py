"""Turns a step that cannot finish into an error, and ends the process so that peers notice.

Python cannot interrupt a thread that waits for an array. A second thread therefore checks the
pending work fifty times a second, oldest first. Its clock measures how long the same item has been
the oldest: a step may take long, but some item must finish every `timeout` seconds. If none does,
or if an item has failed because its peer is gone, the thread prints the reason on stderr. Then the
main thread raises it if it is in `wait`; otherwise the process ends. Peers notice, and end too.
"""

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

Watched = list[Any]
"""A pending item: its label, and its arrays, or None while it is being dispatched."""


class MpmdError(RuntimeError):
    """Error of a step that cannot finish: a peer is gone, or no item has finished for too long."""


@dataclass(frozen=True)
class Watchdog:
    """A running watchdog.

    Attributes:
        timeout: Longest time in which no item finishes, in seconds.
        grace: Time for the main thread to raise, and then to exit, in seconds.
        process: The index of this process.
        has_peers: Whether other processes wait for this one.
        new: Items that were dispatched since the last check.
        under_way: Items that had not finished at the last check, oldest first.
        reasons: Why the step cannot finish; empty while it can.
        raised: Set once the main thread has raised the reason.
        stopped: Set to stop the watchdog.
    """

    timeout: float
    grace: float
    process: int
    has_peers: bool
    new: deque[Watched] = field(default_factory=deque)
    under_way: list[Watched] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    raised: threading.Event = field(default_factory=threading.Event)
    stopped: threading.Event = field(default_factory=threading.Event)


def start_watchdog(timeout: float) -> Watchdog:
    """Starts the watchdog of this process.

    Args:
        timeout: Longest time in which no item finishes, in seconds: longer than any single program,
            and longer than a peer may wait for the first data of a step.

    Returns:
        The watchdog.

    Raises:
        ValueError: If `timeout` is not positive.
    """
    if timeout <= 0:
        raise ValueError(f"`timeout` is {timeout}. Give the seconds after which a step is stuck.")
    grace = min(1.0, timeout / 4)
    dog = Watchdog(timeout, grace, jax.process_index(), jax.process_count() > 1)
    threading.Thread(target=_patrol, args=(dog,), daemon=True, name="jaxpipe watchdog").start()
    return dog


def begin(dog: Watchdog, label: str) -> Watched:
    """Watches an item that is about to be dispatched.

    On CPU the dispatch may last as long as the program. The caller must call `made` afterwards,
    also after an exception.

    Args:
        dog: The watchdog.
        label: The text that names the item in errors, with action, rank and peer.

    Returns:
        The item, for `made`.
    """
    watched = [label, None]
    dog.new.append(watched)
    return watched


def made(watched: Watched, arrays: Sequence[jax.Array]) -> None:
    """Sets the arrays of an item, which is watched until they are ready.

    The watchdog holds the arrays until then, so give the smallest result of a program: all of its
    results are ready at the same time. Give none if the dispatch has failed.

    Args:
        watched: The item, from `begin`.
        arrays: Results of the transfer or the program.
    """
    watched[1] = arrays


def wait(dog: Watchdog, arrays: Sequence[jax.Array]) -> None:
    """Waits for arrays like `jax.block_until_ready`, but raises if the step cannot finish.

    Args:
        dog: The watchdog.
        arrays: The arrays to wait for.

    Raises:
        MpmdError: If the watchdog has found that the step cannot finish.
    """
    pause = 1e-5
    while not dog.reasons and not _are_ready(arrays):
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    try:
        if not dog.reasons:
            jax.block_until_ready(arrays)
            return
    except jax.errors.JaxRuntimeError:
        # An item that this array depends on may have failed: its error says more.
        time.sleep(3 * POLL_SECONDS)
        if not dog.reasons:
            raise
    dog.raised.set()
    raise MpmdError(dog.reasons[0])


def give_up(dog: Watchdog, error: Exception) -> None:
    """Reports that a step has ended early with an error.

    Peers would wait forever for the remaining data, so if there are any, this process ends after
    some time for the traceback.

    Args:
        dog: The watchdog.
        error: The error that ended the step.
    """
    if dog.has_peers:
        dog.raised.set()
        _say(dog, f"{type(error).__name__}: {error}")


def stop(dog: Watchdog) -> None:
    """Stops the watchdog, without ending the process."""
    dog.stopped.set()


def _patrol(dog: Watchdog) -> None:
    """Runs the watchdog's thread."""
    if dog.has_peers:
        on_abort(lambda: _say_before_abort(dog))
    oldest, since = None, 0.0
    while not dog.stopped.wait(POLL_SECONDS):
        failure = _look(dog)
        first = dog.under_way[0] if dog.under_way else None
        if first is not oldest:
            oldest, since = first, time.monotonic()
        elif first is not None and time.monotonic() - since > dog.timeout:
            failure = failure or f"{first[0]} has not finished within {dog.timeout} seconds"
        if failure and not dog.reasons:
            _say(dog, failure)
        if dog.reasons:
            _leave(dog)
            return


def _look(dog: Watchdog) -> str | None:
    """Forgets the items that have finished. Returns the failure of an item, None if none failed."""
    while dog.new:
        dog.under_way.append(dog.new.popleft())
    there = [watched for watched in dog.under_way if _is_there(watched)]
    # Without peers no other process waits, and the reader of the array sees the error.
    if dog.has_peers and any(map(_failure, there)):
        # A failure spreads to all items that depend on the array, possibly during this check, so
        # check once more, oldest first.
        there = (watched for watched in dog.under_way if _is_there(watched))
        return next(filter(None, map(_failure, there)), None)
    gone = set(map(id, there))
    dog.under_way[:] = [watched for watched in dog.under_way if id(watched) not in gone]
    return None


def _say(dog: Watchdog, reason: str) -> None:
    dog.reasons.append(f"process {dog.process}: {reason}")
    print(f"jaxpipe: {dog.reasons[0]}", file=sys.stderr, flush=True)


def _leave(dog: Watchdog) -> None:
    """Ends the process, unless the main thread has raised the reason and there are no peers."""
    if not dog.raised.wait(dog.grace):
        faulthandler.dump_traceback(sys.__stderr__ or 2)
    elif dog.has_peers:
        # Leaves time for the traceback. At a normal exit JAX would wait five minutes for peers.
        time.sleep(dog.grace)
    else:
        return
    exit_immediately()


def _is_there(watched: Watched) -> bool:
    return watched[1] is not None and _are_ready(watched[1])


def _are_ready(arrays: Sequence[jax.Array]) -> bool:
    try:
        return all(array.is_deleted() or _numbers(array).is_ready() for array in arrays)
    except RuntimeError:  # deleted in between
        return False


def _failure(watched: Watched) -> str | None:
    """Returns why arrays that are ready have failed, None if they have not."""
    label, arrays = watched
    for array in arrays:
        try:
            array.block_until_ready()
        except RuntimeError as error:
            if not array.is_deleted():  # donated to the next program: it was fine
                return f"{label} has failed: {_meaning(str(error))}"
    return None


def _meaning(error: str) -> str:
    first = error.splitlines()[0]
    if "Error while transferring" in first:
        return f"the peer has nothing to send ({first})"
    if "recv()" in first:
        return f"the connection is lost, so the peer has died or left ({first})"
    return first


def _numbers(array: Any) -> Any:
    """Returns the array, or the data of typed keys, which have no `is_ready`."""
    return array if hasattr(array, "is_ready") else jax.random.key_data(array)


def _say_before_abort(dog: Watchdog) -> None:
    """Prints the pending item when JAX aborts the process.

    If the watchdog has printed a reason already, this function waits until the watchdog ends the
    process with its own exit code.
    """
    if dog.reasons:
        time.sleep(2 * dog.grace + 1.0)
        return
    first = [f"{label} is under way" for label, _ in dog.under_way[:1]]
    what = _look(dog) or (first or ["nothing is under way"])[0]
    os.write(2, f"jaxpipe: process {dog.process}: {what}, and JAX aborts\n".encode())
