"""The processes of a job on one machine: starts them, and finds out which of them failed first.

Each process inherits the reading end of a pipe. A line in it names another process that has ended;
the end of the pipe says that the launcher has, however it ended. On Linux the kernel also kills the
processes of a launcher that ends, even those that are stopped.
"""

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from ..._exit import EXIT_CODE, exit_immediately

_POLL_SECONDS = 0.05
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that end a run."""
_STOPPED = tuple(128 + signum for signum in _ENDING)
"""The exit codes of a run that has saved and ended after a signal to any of its processes."""
_STOP_SECONDS = 5.0
"""How far apart the processes of such a run may end."""


@dataclass
class Job:
    """The processes of a job."""

    popens: list[subprocess.Popen]  # in order
    outputs: list[threading.Thread] = field(default_factory=list)  # copy what they print
    signals: list[signal.Signals] = field(default_factory=list)  # passed on to all, in order
    # Tells all other processes that one has ended, and how.
    notify_others: Callable[[int, str], None] = lambda ended, how: None

    @property
    def failed(self) -> tuple[int, int] | None:
        """Returns the process that failed first and its exit code; None if none has failed."""
        # A process that ended because of a signal that was passed on has not failed. If several
        # have ended since the last poll, one that a signal has killed comes first: the others may
        # have ended because of it.
        codes = enumerate(popen.poll() for popen in self.popens)
        obeyed = {0, *(128 + signum for signum in self.signals)}
        failed = [(i, x) for i, x in codes if x is not None and _exit_code(x) not in obeyed]
        return min(failed, key=lambda one: (_may_follow(one[1]), one[0]), default=None)

    @property
    def still_running(self) -> list[int]:
        """Returns the processes that still run."""
        return [i for i, popen in enumerate(self.popens) if popen.poll() is None]


def _may_follow(code: int) -> int:
    """Returns a rank: the higher, the likelier another process caused the end with this code."""
    return 2 if code in (EXIT_CODE, -signal.SIGABRT) else int(code > 0)


@contextlib.contextmanager
def started_processes(commands: Sequence[tuple[list[str], dict[str, str]]]) -> Iterator[Job]:
    """Starts processes, passes signals on to them, and kills those that are left at the end."""
    # Each is a process group of its own, so that Ctrl-C reaches it from here and not a second time
    # from the terminal: a second signal ends a process at once.
    job, lifelines = Job([]), Lifelines()

    def pass_on(signum: int, frame: object) -> None:
        del frame
        job.signals.append(signal.Signals(signum))
        for popen in job.popens:
            popen.send_signal(signum)

    def suspend(signum: int, frame: object) -> None:
        del signum, frame
        for popen in job.popens:
            popen.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for popen in job.popens:
            popen.send_signal(signal.SIGCONT)

    with _handled(dict.fromkeys(_ENDING, pass_on) | {signal.SIGTSTP: suspend}):
        try:
            for process, (command, environment) in enumerate(commands):
                out, err = (subprocess.PIPE, subprocess.STDOUT) if process else (None, None)
                popen = lifelines.start(
                    process, command, environment, stdout=out, stderr=err, process_group=0
                )
                job.popens.append(popen)
                if job.signals:
                    popen.send_signal(job.signals[-1])
                if process:
                    job.outputs.append(_show(process, popen.stdout))
            job.notify_others = lifelines.notify_others
            yield job
        finally:
            for popen in job.popens:
                popen.kill()  # SIGTERM only asks a run to stop after its next step
            for popen in job.popens:
                popen.wait()
            lifelines.close()
            for output in job.outputs:
                output.join(timeout=5)


@contextlib.contextmanager
def _handled(handlers: Mapping[signal.Signals, Callable[[int, Any], None]]) -> Iterator[None]:
    """Handles signals inside this context, except those that are ignored, as after `nohup`."""
    not_ignored = {n: h for n, h in handlers.items() if signal.getsignal(n) != signal.SIG_IGN}
    before = {signum: signal.signal(signum, handler) for signum, handler in not_ignored.items()}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def first_failure(job: Job, grace: float) -> int:
    """Waits for all processes, or `grace` seconds after a failure, and prints who failed first."""
    first: tuple[int, int] | None = None
    deadline = notify_at = math.inf
    while job.still_running and time.monotonic() < deadline and len(job.signals) < 2:
        time.sleep(_POLL_SECONDS)
        if first is None and (first := job.failed):
            deadline = time.monotonic() + grace
            notify_at = time.monotonic() + (_STOP_SECONDS if first[1] in _STOPPED else 0.0)
        if first and time.monotonic() > notify_at:
            notify_at = math.inf
            job.notify_others(first[0], _how(first[1]))
    if not job.still_running and {popen.returncode for popen in job.popens} in [
        {x} for x in _STOPPED
    ]:
        return job.popens[0].returncode
    first = first or job.failed
    rest = f"The processes {job.still_running} have not ended, and are killed."
    if first is None:
        if not job.still_running:
            return max(_exit_code(popen.returncode) for popen in job.popens)
        name = job.signals[-1].name
        print(f"jaxpipe: error: {name} came again. {rest}", file=sys.stderr)
        return 128 + job.signals[-1]
    process, code = first
    said = f"process {process} has ended {_how(code)}."
    print(
        f"jaxpipe: error: {said} {rest}" if job.still_running else f"jaxpipe: error: {said}",
        file=sys.stderr,
    )
    return _exit_code(code)


def _exit_code(code: int) -> int:
    """Returns the exit code as shells have it for one of `Popen`, negative after a signal."""
    return 128 - code if code < 0 else code


def _how(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"


def _show(process: int, lines: IO[bytes] | None) -> threading.Thread:
    """Copies what a process prints, with its number before every line."""

    def copy() -> None:
        assert lines is not None
        with lines:
            for line in lines:
                sys.stderr.write(f"[{process}] {line.decode(errors='replace')}")
                sys.stderr.flush()

    thread = threading.Thread(target=copy, daemon=True, name=f"output of process {process}")
    thread.start()
    return thread


LIFELINE = "JAXPIPE_LAUNCHER_PIPE"
"""The environment variable with the file descriptor of the pipe that a process inherits."""
_GRACE_SECONDS = 2.0
"""How long a process runs after that message: its main thread may still report an error."""
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


class Lifelines:
    """The writing ends of the pipes to all processes, in the launcher."""

    def __init__(self) -> None:
        self._writers: dict[int, int] = {}

    def start(
        self, process: int, command: Sequence[str], environment: Mapping[str, str], **options: Any
    ) -> subprocess.Popen:
        """Starts a process with a pipe to it."""
        reader, self._writers[process] = os.pipe()
        try:
            return subprocess.Popen(
                command, env={**environment, LIFELINE: str(reader)}, pass_fds=(reader,), **options
            )
        finally:
            os.close(reader)

    def notify_others(self, ended: int, how: str) -> None:
        """Tells every other process that one has ended, and how."""
        for process, writer in self._writers.items():
            if process != ended:
                with contextlib.suppress(BrokenPipeError):  # it has ended too
                    os.write(writer, f"process {ended} has ended {how}\n".encode())

    def close(self) -> None:
        """Closes all pipes, on which processes that still run end."""
        for writer in self._writers.values():
            os.close(writer)
        self._writers.clear()


def follow_launcher(name: str) -> None:
    """Ends this process when its launcher, if it has one, or another process has ended."""
    reader = os.environ.pop(LIFELINE, None)  # not for the children of this process
    if reader is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The pipe is read after that call: a launcher that ended before it has closed the pipe.
    arguments = (int(reader), name)
    threading.Thread(target=_listen, args=arguments, daemon=True, name="launcher").start()


def _listen(reader: int, name: str) -> None:
    with os.fdopen(reader) as lines:
        news = lines.readline().strip() or "the launcher has ended"
    print(f"jaxpipe: {name}: {news}, so this process ends", file=sys.stderr, flush=True)
    time.sleep(_GRACE_SECONDS)
    exit_immediately()
