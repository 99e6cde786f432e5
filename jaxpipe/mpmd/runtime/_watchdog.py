"""A watchdog: what does not finish becomes an error with a name, and no process stays behind.

A thread that waits for an array cannot be interrupted from Python. So another one looks, fifty
times a second, at what is under way, oldest first. Its clock runs for the oldest only, from when it
became that: a step may take long, but something must finish every `timeout` seconds. When nothing
does, or what is under way has failed because its peer is gone, it says so on stderr; then the main
thread raises, if it is in `wait`, and else the process ends. So peers notice, and end too.
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
"""Something under way: its label, and its arrays, or None as long as it is being dispatched."""


class MpmdError(RuntimeError):
    """A step that cannot finish: a peer is gone, or nothing has moved for too long."""


@dataclass(frozen=True)
class Watchdog:
    """A running watchdog.

    Attributes:
        timeout: How long nothing may finish, in seconds.
        grace: How long the main thread has for raising, and then for leaving, in seconds.
        process: The index of this process.
        has_peers: Whether others wait for this process.
        new: What has been dispatched since the last look.
        under_way: What had not finished at the last look, oldest first.
        reasons: Why the step cannot finish: none as long as it may.
        raised: Set once the main thread has raised the reason.
        stopped: Set to end the watch.
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
        timeout: How long nothing may finish, in seconds: longer than any one program, and than a
            peer may have to wait for the first data of a step.

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
    """Watches something that is about to be dispatched: on CPU a call may take as long as it runs.

    Whoever calls this owes a `made`, also after an exception.

    Args:
        dog: The watchdog.
        label: What it is, with action, rank and peer.
    """
    watched = [label, None]
    dog.new.append(watched)
    return watched


def made(watched: Watched, arrays: Sequence[jax.Array]) -> None:
    """Says what was dispatched, and is watched until it is there.

    Arrays are held until then, so of what a program makes give the smallest: all of it is there at
    the same time. Give none if nothing came of it.

    Args:
        watched: From `begin`.
        arrays: What the transfer or the program has returned.
    """
    watched[1] = arrays


def wait(dog: Watchdog, arrays: Sequence[jax.Array]) -> None:
    """Waits for arrays like `jax.block_until_ready`, and never forever.

    Raises:
        MpmdError: If the watchdog has found out that the step cannot finish.
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
        # What it came from may be among what is watched: that says more than this array.
        time.sleep(3 * POLL_SECONDS)
        if not dog.reasons:
            raise
    dog.raised.set()
    raise MpmdError(dog.reasons[0])


def give_up(dog: Watchdog, error: Exception) -> None:
    """Says that a step has ended in the middle, by this error.

    Peers wait for what never comes, so if there are any, this process ends once there was time for
    the traceback.
    """
    if dog.has_peers:
        dog.raised.set()
        _say(dog, f"{type(error).__name__}: {error}")


def stop(dog: Watchdog) -> None:
    """Ends the watch, not the process."""
    dog.stopped.set()


def _patrol(dog: Watchdog) -> None:
    """The thread."""
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
    """Lets go of what is there. Returns what has failed, if anything has."""
    while dog.new:
        dog.under_way.append(dog.new.popleft())
    there = [watched for watched in dog.under_way if _is_there(watched)]
    # Without peers whoever reads the array sees the error, and nobody else waits.
    if dog.has_peers and any(map(_failure, there)):
        # A failure spreads to all that needs the array, maybe while we looked: once more.
        there = (watched for watched in dog.under_way if _is_there(watched))
        return next(filter(None, map(_failure, there)), None)
    gone = set(map(id, there))
    dog.under_way[:] = [watched for watched in dog.under_way if id(watched) not in gone]
    return None


def _say(dog: Watchdog, reason: str) -> None:
    dog.reasons.append(f"process {dog.process}: {reason}")
    print(f"jaxpipe: {dog.reasons[0]}", file=sys.stderr, flush=True)


def _leave(dog: Watchdog) -> None:
    """Ends the process, unless the main thread has raised the reason and nobody waits for it."""
    if not dog.raised.wait(dog.grace):
        faulthandler.dump_traceback(sys.__stderr__ or 2)
    elif dog.has_peers:
        # Time for its traceback. Left alone, JAX waits five minutes at exit for the dead.
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
    """What went wrong with arrays that are ready, if anything did."""
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
    """The array, or that of typed keys, which cannot be asked whether it is ready."""
    return array if hasattr(array, "is_ready") else jax.random.key_data(array)


def _say_before_abort(dog: Watchdog) -> None:
    """Says what is under way when JAX aborts the process.

    If the watchdog has said more already, it has the time it needs for ending the process with its
    own exit code.
    """
    if dog.reasons:
        time.sleep(2 * dog.grace + 1.0)
        return
    first = [f"{label} is under way" for label, _ in dog.under_way[:1]]
    what = _look(dog) or (first or ["nothing is under way"])[0]
    os.write(2, f"jaxpipe: process {dog.process}: {what}, and JAX aborts\n".encode())
