"""`jaxpipe launch --processes N [CONFIG.yml ...] [key=value ...]`"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO

from ._processes import ADDRESS, NUM_PROCESSES, PROCESS
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
        help="how long the others may go on to say what they waited for when one has failed (30)",
    )
    add_settings(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Runs `jaxpipe train` in every process. The exit code of the first that fails, or 0.

    Process 0 has the terminal; lines of the others come with their number, on standard error. No
    process outlives this one unless it is killed by SIGKILL.
    """
    if args.processes < 1:
        raise ValueError(f"`--processes` is {args.processes}. Give at least 1.")
    read_settings(args.settings)  # what is wrong in them is said once
    with _running(_commands(args.settings, args.processes, args.gpus_per_process)) as running:
        return _first_failure(running, args.grace)


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


@contextlib.contextmanager
def _running(
    commands: Sequence[tuple[list[str], dict[str, str]]],
) -> Iterator[list[subprocess.Popen]]:
    """Processes, none of which is left behind."""
    running: list[subprocess.Popen] = []

    def end(number: int, frame: object) -> None:
        del frame
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        for process, (command, environment) in enumerate(commands):
            out, err = (subprocess.PIPE, subprocess.STDOUT) if process else (None, None)
            popen = subprocess.Popen(command, env=environment, stdout=out, stderr=err)
            running.append(popen)
            if process:
                _show(process, popen.stdout)
        yield running
    finally:
        signal.signal(signal.SIGTERM, before)
        for popen in running:
            popen.kill()  # SIGTERM would not do: JAX takes it for a notice of preemption
        for popen in running:
            popen.wait()


def _first_failure(running: Sequence[subprocess.Popen], grace: float) -> int:
    """Waits until all have ended, or one has failed and the others had time to say why they end."""
    failed: tuple[int, int] | None = None
    deadline = float("inf")
    while any(popen.poll() is None for popen in running) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        if failed is None:
            failed = next(((i, p.returncode) for i, p in enumerate(running) if p.poll()), None)
            deadline = time.monotonic() + grace if failed else deadline
    failed = failed or next(((i, p.returncode) for i, p in enumerate(running) if p.poll()), None)
    if failed is None:
        return 0
    process, code = failed
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    left = [i for i, popen in enumerate(running) if popen.poll() is None]
    rest = f" The processes {left} had not ended {grace:g} s later and are killed." if left else ""
    print(f"jaxpipe: error: process {process} has ended {how}.{rest}", file=sys.stderr)
    return 128 - code if code < 0 else code


def _show(process: int, lines: IO[bytes] | None) -> None:
    """Copies what a process prints, with its number before every line."""

    def copy() -> None:
        assert lines is not None
        for line in lines:
            sys.stderr.write(f"[{process}] {line.decode(errors='replace')}")
            sys.stderr.flush()

    threading.Thread(target=copy, daemon=True, name=f"output of process {process}").start()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
