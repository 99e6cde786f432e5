"""`jaxpipe launch --processes N [CONFIG.yml ...] [key=value ...]`"""

import argparse
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from ._processes import ADDRESS, NUM_PROCESSES, PROCESS, TERMINATED
from ._settings import add_settings, read_settings

_HELP = "train a model in several processes on this machine"
_POLL_SECONDS = 0.05


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Registers the command."""
    parser = subparsers.add_parser("launch", help=_HELP, description=_HELP.capitalize() + ".")
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="how many")
    parser.add_argument(
        "--gpus-per-process", type=int, metavar="K", help="process i uses the GPUs i K to (i+1) K-1"
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long the others may go on when one has failed (30)",
    )
    add_settings(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Runs `jaxpipe train` in every process. The exit code of the first that fails, or 0.

    Process 0 has the terminal; lines of the others come with their number, on standard error. No
    process outlives this one where it can help it: SIGTERM reaches all, Ctrl-C too.
    """
    if args.processes < 1:
        raise ValueError(f"`--processes` is {args.processes}. Give at least 1.")
    if args.gpus_per_process is not None and args.gpus_per_process < 1:
        raise ValueError(f"`--gpus-per-process` is {args.gpus_per_process}. Give at least 1.")
    read_settings(args.settings)  # what is wrong in them is said once
    commands = _commands(args.settings, args.processes, args.gpus_per_process)
    with _started(commands) as job:
        return _first_failure(job, args.grace)


def _commands(
    settings: Sequence[str], num_processes: int, num_gpus: int | None
) -> list[tuple[list[str], dict[str, str]]]:
    """Of every process its arguments and its environment."""
    address = f"127.0.0.1:{_free_port()}"
    command = [sys.executable, "-m", "jaxpipe", "train", *settings]
    found = []
    for process in range(num_processes):
        job = {ADDRESS: address, NUM_PROCESSES: str(num_processes), PROCESS: str(process)}
        if num_gpus:
            mine = range(process * num_gpus, (process + 1) * num_gpus)
            job["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, mine))
        found.append((command, {**os.environ, **job}))
    return found


@dataclass
class _Job:
    """Processes.

    Attributes:
        running: Of each process, in order.
        outputs: The threads that show what they print.
        signals: How often all were told to end.
    """

    running: list[subprocess.Popen]
    outputs: list[threading.Thread]
    signals: int = 0

    @property
    def failed(self) -> tuple[int, int] | None:
        """The first process that ended in vain, and its code; not those that were told to end."""
        codes = enumerate(popen.poll() for popen in self.running)
        obeyed = (0, TERMINATED) if self.signals else (0,)
        return next(((i, code) for i, code in codes if code not in (None, *obeyed)), None)

    @property
    def left(self) -> list[int]:
        return [i for i, popen in enumerate(self.running) if popen.poll() is None]


@contextlib.contextmanager
def _started(commands: Sequence[tuple[list[str], dict[str, str]]]) -> Iterator[_Job]:
    """Processes, none of which is left behind. They get the SIGTERM that this one gets; after a
    second one they are killed."""
    job = _Job([], [])

    def pass_on(number: int, frame: object) -> None:
        del frame
        job.signals += 1
        for popen in job.running:
            popen.send_signal(number)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        for process, (command, environment) in enumerate(commands):
            out, err = (subprocess.PIPE, subprocess.STDOUT) if process else (None, None)
            popen = subprocess.Popen(command, env=environment, stdout=out, stderr=err)
            job.running.append(popen)
            if job.signals:
                popen.send_signal(signal.SIGTERM)
            if process:
                job.outputs.append(_show(process, popen.stdout))
        yield job
    finally:
        signal.signal(signal.SIGTERM, before)
        for popen in job.running:
            popen.kill()  # SIGTERM would not do: it is a wish to stop after the next step
        for popen in job.running:
            popen.wait()
        for output in job.outputs:
            output.join(timeout=5)


def _first_failure(job: _Job, grace: float) -> int:
    """Waits until all have ended, or until those who should have had time for it."""
    first: tuple[int, int] | None = None
    deadline = math.inf
    while job.left and time.monotonic() < deadline and job.signals < 2:
        time.sleep(_POLL_SECONDS)
        if first is None and (first := job.failed):
            deadline = time.monotonic() + grace
    first = first or job.failed
    rest = f"The processes {job.left} have not ended, and are killed."
    if first is None:
        if not job.left:
            return max(popen.returncode for popen in job.running)
        print(f"jaxpipe: error: SIGTERM came twice. {rest}", file=sys.stderr)
        return TERMINATED
    process, code = first
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    print(
        f"jaxpipe: error: process {process} has ended {how}. {rest if job.left else ''}".rstrip(),
        file=sys.stderr,
    )
    return 128 - code if code < 0 else code


def _show(process: int, lines: IO[bytes] | None) -> threading.Thread:
    """Copies what a process prints, with its number before every line."""

    def copy() -> None:
        assert lines is not None
        for line in lines:
            sys.stderr.write(f"[{process}] {line.decode(errors='replace')}")
            sys.stderr.flush()

    thread = threading.Thread(target=copy, daemon=True, name=f"output of process {process}")
    thread.start()
    return thread


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
