"""Watches the steps of several processes, and names the one that is behind or has ended.

Once a second a thread writes where its process is, its step and phase, into the key-value store of
`jax.distributed`, and reads where the others are. If no process makes progress for too long, each
names the one that is behind and ends: JAX alone would wait forever. If a process has left with an
error, or gives no sign of life, the others name it too.
"""

import itertools
import json
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

import jax

from ..._compat import distributed_state
from ..._exit import exit_immediately, on_abort
from ._stop import RunError, TerminatedError

POLL_SECONDS = 0.25
HEARTBEAT_SECONDS = 1.0
SILENT_SECONDS = 10.0
"""The seconds of silence after which a process is named. JAX ends the other processes later."""
LOST_SECONDS = 5.0
"""The seconds of silence after which a process is named if an error shows that one has ended."""
FIRST_SECONDS = 3600.0
"""The seconds that the first phase of each kind may take, because it compiles."""
GRACE_SECONDS = 2.0
"""The seconds in which the main thread may report more than the watch knows."""

PHASES = ("start", "data", "step", "traced step", "evaluation", "checkpoint", "end")
"""The phases of a run and of a step, in order."""

_STATUS = re.compile(
    r"(ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|UNAVAILABLE|UNKNOWN): "
)
"""The beginning of errors of the runtime that the end of another process may cause."""

_runs = itertools.count()


@dataclass(frozen=True)
class Position:
    """The position of a process in a run.

    Attributes:
        progress: How often it has made progress.
        error: The error by which it has left the run; "" if it has not.
        heartbeat: How often it has written its position.
    """

    step: int = 0
    phase: str = "start"
    progress: int = 0
    is_first: bool = True
    error: str = ""
    heartbeat: int = 0

    def __str__(self) -> str:
        return f"step {self.step} ({self.phase})" if self.step else "its start"


class KeyValueStore:
    """The store of `jax.distributed`, for one run."""

    def __init__(self) -> None:
        # All processes begin the same runs in the same order.
        self._folder = f"jaxpipe/steps/{next(_runs)}/"
        self._client = distributed_state().client

    def put(self, text: str) -> None:
        """Stores a text for this process, in place of the one before."""
        key = f"{self._folder}{jax.process_index()}"
        self._client.key_value_set(key, text, allow_overwrite=True)

    def read(self) -> Mapping[int, str]:
        """Returns the last text of each process."""
        texts = self._client.key_value_dir_get(self._folder)
        return {int(key.rpartition("/")[2]): text for key, text in texts}


@dataclass
class ProcessLedger:
    """What one process knows of the positions of all processes."""

    process: int
    timeout: float
    positions: dict[int, Position]
    still: dict[int, float] = field(default_factory=dict)
    silent: dict[int, float] = field(default_factory=dict)
    unanswered: float = 0.0

    def update(self, positions: Mapping[int, Position], seconds: float, *, answered: bool) -> None:
        """Records the positions of all processes, `seconds` of running time after the last call."""
        for process, before in self.positions.items():
            now = positions.get(process, before)
            moved, spoke = now.progress != before.progress, now.heartbeat != before.heartbeat
            self.still[process] = 0.0 if moved else self.still.get(process, 0.0) + seconds
            self.silent[process] = 0.0 if spoke else self.silent.get(process, 0.0) + seconds
            self.positions[process] = now
        self.unanswered = 0.0 if answered else self.unanswered + seconds

    def silent_processes(self, seconds: float) -> list[int]:
        """Returns the other processes that have given no sign of life for so many seconds.

        A process that has ended its run or left it does not count. While process 0 does not answer,
        this process knows nothing of the others: then only process 0 is returned.
        """
        if self.unanswered >= seconds:
            return [0] if self.process else []
        return [
            process
            for process, position in self.positions.items()
            if process != self.process and position.phase != "end" and not position.error
            if self.silent.get(process, 0.0) >= seconds
        ]

    def describe_exit(self) -> str:
        """Returns which process has left the run by which error; "" if none has."""
        errors = {p: position.error for p, position in self.positions.items() if p != self.process}
        return next(
            (f"process {p} has left the run: {why}" for p, why in errors.items() if why), ""
        )

    def describe_stall(self) -> str:
        """Returns which process is behind, if none has made progress for too long; else ""."""
        under_way = {
            p: position for p, position in self.positions.items() if position.phase != "end"
        }
        if not self.timeout or self.process not in under_way:
            return ""
        for process, position in under_way.items():
            # A process that compiles still gives signs of life.
            compiles = position.is_first and self.silent.get(process, 0.0) < SILENT_SECONDS
            limit = max(self.timeout, FIRST_SECONDS) if compiles else self.timeout
            if self.still.get(process, 0.0) < limit:
                return ""
        if silent := self.silent_processes(min(LOST_SECONDS, self.timeout)):
            who = self.describe_silence(silent)
        else:
            last = min(
                (position.step, PHASES.index(position.phase)) for position in under_way.values()
            )
            behind = [p for p, x in under_way.items() if (x.step, PHASES.index(x.phase)) == last]
            position, are = under_way[behind[0]], "is" if len(behind) == 1 else "are"
            who = f"{_listed(behind)} {are} behind, in {position}"
            if len(behind) == len(under_way):
                who = f"all of them are in {position}"
        return (
            f"no process has gone on for {self.still[self.process]:.0f} seconds, while this one is "
            f"in {under_way[self.process]}: {who}. Where that is no fault raise "
            "`step_timeout_minutes`"
        )

    def describe_silence(self, silent: list[int]) -> str:
        """Returns a text on processes without a sign of life and their last known position."""
        seconds = max(self.silent.get(process, 0.0) for process in silent)
        have = "has" if len(silent) == 1 else "have"
        where = f", last heard of in {self.positions[silent[0]]}" if len(silent) == 1 else ""
        return (
            f"{_listed(silent)} {have} given no sign of life for {seconds:.0f} seconds{where} "
            "(dead, stopped or cut off)"
        )


def _listed(processes: list[int]) -> str:
    if len(processes) == 1:
        return f"process {processes[0]}"
    return f"processes {', '.join(map(str, processes[:8]))}{', ...' if processes[8:] else ''}"


class StepWatch:
    """Watches the steps as a context manager. It does nothing if there is only one process."""

    def __init__(self, timeout_minutes: float) -> None:
        """Starts the watch; a run without progress for `timeout_minutes` (if not 0) is stuck."""
        count, self._process = jax.process_count(), jax.process_index()
        self._is_alone = count == 1
        self._position = Position()
        self._seen = {"start"}
        self._known: Mapping[int, Position] = {}
        self._answers = 0
        self._is_over = threading.Event()  # the main thread has left the run
        self._ledger = ProcessLedger(
            self._process, 60 * timeout_minutes, {p: Position() for p in range(count)}
        )
        self._threads: list[threading.Thread] = []

    def enter(self, step: int, phase: str) -> None:
        """Records that this process begins a phase."""
        is_first = phase not in self._seen
        self._seen.add(phase)
        progress = self._position.progress + 1
        self._position = replace(
            self._position, step=step, phase=phase, progress=progress, is_first=is_first
        )

    def record_progress(self) -> None:
        """Records progress of this process within its phase."""
        self._position = replace(
            self._position, progress=self._position.progress + 1, is_first=False
        )

    def __enter__(self) -> "StepWatch":
        if not self._is_alone:
            on_abort(self._print_before_abort)
            for work, *args in (
                (self._exchange_positions, KeyValueStore()),
                (self._check_positions,),
            ):
                thread = threading.Thread(target=work, args=args, daemon=True, name="step watch")
                thread.start()
                self._threads.append(thread)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        del kind, trace
        if self._is_alone:
            return
        if error is None or isinstance(error, TerminatedError):
            self.enter(self._position.step, "end")
            self._end()
            return
        lost = self._find_lost_peer() if may_be_caused_by_peer(error) else ""
        what = "interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
        first = next(iter(str(error).splitlines()), "")
        why = lost or (f"{what}: {first}" if first else what)
        self._position = replace(self._position, error=why)
        self._end()
        if lost:
            raise RunError(f"{lost}. Here, in {self._position}, it was seen as: {first}") from error

    def _end(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(GRACE_SECONDS)  # says where this process is for the last time

    def _find_lost_peer(self) -> str:
        """Waits until it is known which process caused an error. Returns "" if none is found."""
        deadline = time.monotonic() + LOST_SECONDS + 3 * HEARTBEAT_SECONDS
        while time.monotonic() < deadline:
            if exit_text := self._ledger.describe_exit():
                return exit_text
            if silent := self._ledger.silent_processes(LOST_SECONDS):
                return self._ledger.describe_silence(silent)
            time.sleep(POLL_SECONDS)
        return ""

    def _exchange_positions(self, store: KeyValueStore) -> None:
        """Exchanges positions, in a thread: calls may take long if process 0 is stopped or gone."""
        for heartbeat in itertools.count(1):
            is_last = self._is_over.is_set()
            try:
                store.put(json.dumps(asdict(replace(self._position, heartbeat=heartbeat))))
                texts = store.read()
                self._known = {p: Position(**json.loads(text)) for p, text in texts.items()}
                self._answers += 1
            except jax.errors.JaxRuntimeError:
                pass  # process 0 does not answer
            if is_last:
                return
            self._is_over.wait(HEARTBEAT_SECONDS)

    def _check_positions(self) -> None:
        """Checks all positions, in a thread that `_exchange_positions` cannot block."""
        before, answers, named = time.monotonic(), 0, set[int]()
        seconds_since_exit = 0.0
        while not self._is_over.wait(POLL_SECONDS):
            now = time.monotonic()
            seconds, before = min(now - before, 2 * HEARTBEAT_SECONDS), now
            answered, answers = self._answers != answers, self._answers
            positions = {**self._known, self._process: self._position}
            self._ledger.update(positions, seconds, answered=answered)
            silent = set(self._ledger.silent_processes(SILENT_SECONDS))
            if silent - named:
                self._print(self._ledger.describe_silence(sorted(silent - named)))
            named = silent
            exit_text = self._ledger.describe_exit()
            seconds_since_exit = seconds_since_exit + seconds if exit_text else 0.0
            reason = self._ledger.describe_stall() or (
                exit_text if seconds_since_exit > GRACE_SECONDS else ""
            )
            if reason:
                self._print(f"{reason}. This process ends")
                time.sleep(GRACE_SECONDS)  # all say it before the first has ended
                exit_immediately()

    def _print(self, what: str) -> None:
        print(f"jaxpipe: process {self._process}: {what}.", file=sys.stderr, flush=True)

    def _print_before_abort(self) -> None:
        if self._is_over.is_set() and not self._position.error:
            return
        silent = self._ledger.silent_processes(LOST_SECONDS)
        who = (
            self._ledger.describe_silence(silent)
            if silent
            else "process 0, at which all meet, has gone"
        )
        what = f"{who}, and JAX ends this process in {self._position}"
        os.write(2, f"jaxpipe: process {self._process}: {what}.\n".encode())


def may_be_caused_by_peer(error: BaseException) -> bool:
    """Returns whether the end of another process may have caused an error.

    It may if JAX's runtime has raised the error or one of its causes, except for lack of memory.
    The runtime's errors begin with a status; some of them, such as Gloo's, are a `ValueError`.
    """
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return any(
        isinstance(cause, jax.errors.JaxRuntimeError) or _STATUS.match(str(cause))
        for cause in causes
        if "RESOURCE_EXHAUSTED" not in str(cause)
    )
