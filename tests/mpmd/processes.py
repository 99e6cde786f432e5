"""Tests with real processes: a script that each of them runs, and what became of them."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxpipe.cli.process import emulation_flags
from quick import ENVIRONMENT


@dataclass(frozen=True)
class Ended:
    """A process that has ended.

    Attributes:
        code: Negative if a signal has ended it.
        seconds: From the start of all to its end.
    """

    code: int
    out: str
    err: str
    seconds: float


def run_processes(
    script: Path,
    case: str,
    num_processes: int,
    *,
    seconds: float,
    devices: int = 2,
    watch: Callable[[list[subprocess.Popen]], None] = lambda running: None,
) -> list[Ended]:
    """Runs `script CASE PROCESS NUM_PROCESSES PORT` once per process; none outlives this.

    Args:
        script: A Python file.
        case: Its first argument.
        num_processes: How many.
        seconds: How long they may take.
        devices: How many devices each of them has.
        watch: Is called again and again while they run.

    Raises:
        AssertionError: If one has not ended by itself within `seconds`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = emulation_flags(devices, ENVIRONMENT["XLA_FLAGS"])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    began = time.monotonic()
    running = [
        subprocess.Popen(
            [sys.executable, "-u", script, case, str(process), str(num_processes), str(port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(num_processes)
    ]
    ends: dict[int, float] = {}
    try:
        while len(ends) < num_processes and time.monotonic() - began < seconds:
            time.sleep(0.02)
            watch(running)
            for process, popen in enumerate(running):
                if process not in ends and popen.poll() is not None:
                    ends[process] = time.monotonic() - began
    finally:
        for popen in running:
            popen.kill()  # SIGTERM would not do: JAX takes it for a notice of preemption
        outputs = [popen.communicate() for popen in running]
    logs = "\n".join(f"--- {p}: {out}\n{err}" for p, (out, err) in enumerate(outputs))
    assert len(ends) == num_processes, f"only {sorted(ends)} have ended in {seconds} s\n{logs}"
    return [
        Ended(popen.returncode, out, err, ends[process])
        for process, (popen, (out, err)) in enumerate(zip(running, outputs, strict=True))
    ]
