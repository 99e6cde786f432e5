"""Runs that are killed at random moments, what they say, and who is left."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quick import ENVIRONMENT

from .runs import losses

# A terminal's foreground, also where the tests run in the background.
FOREGROUND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from jaxpipe.cli import script
script()
"""


@dataclass
class Run:
    """A command that runs, and its lines with the time at which each came."""

    popen: subprocess.Popen
    lines: list[tuple[float, str]] = field(default_factory=list)

    @property
    def said(self) -> str:
        return "".join(line for _, line in self.lines)

    def processes(self) -> list[int]:
        """Of a launcher, in order."""
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.popen.pid)], capture_output=True
        )
        return sorted(map(int, listed.stdout.split()))

    def end(self, seconds: float) -> int:
        """Waits for the end. The exit code."""
        try:
            return self.popen.wait(seconds)
        finally:
            self.popen.kill()
            self.popen.wait()
            self.reader.join(60)

    def __post_init__(self) -> None:
        def read() -> None:
            stdout: Any = self.popen.stdout
            with stdout:
                for line in stdout:
                    self.lines.append((time.monotonic(), line))

        self.reader = threading.Thread(target=read, daemon=True)
        self.reader.start()


def start(words: list[str]) -> Run:
    """`jaxpipe WORDS`."""
    return Run(
        subprocess.Popen(
            [sys.executable, "-u", "-c", FOREGROUND, *words],
            env=os.environ | ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    )


def is_running(process: int) -> bool:
    """Whether a process is there, and not only waits for its parent to hear of its end."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until_none_runs(processes: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := [process for process in processes if is_running(process)]:
        assert time.monotonic() < deadline, f"{left} of {processes} still run"
        time.sleep(0.02)


def num_steps(folder: Path) -> int:
    file = folder / "default" / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def wait_for_steps(run: Run, folder: Path, steps: int = 1) -> None:
    """Waits until a run has made steps. A start drops the lines of steps that come again; from then
    on every step adds one."""
    deadline, fewest = time.monotonic() + 300, num_steps(folder)
    while (count := num_steps(folder)) < fewest + steps:
        fewest = min(fewest, count)
        assert run.popen.poll() is None and time.monotonic() < deadline, run.said
        time.sleep(0.01)


@dataclass
class Campaign:
    """A run that is killed again and again.

    Attributes:
        words: Of its command.
        folder: Its `output_dir`.
        num_processes: Under a launcher; 0 without one.
        rng: Chooses moments and victims.
        seen: Every loss of every step that a run has written, with how often it was written.
        naming: Of each death among several, the seconds until all survivors had named it.
    """

    words: list[str]
    folder: Path
    num_processes: int
    rng: random.Random
    seen: set[tuple[int, float]] = field(default_factory=set)
    naming: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def kill(self) -> None:
        """Starts the run and kills one of its processes at a random moment: in most cases while it
        makes steps, and else while it starts."""
        run = start(self.words)
        try:
            if self.rng.random() < 0.8:
                wait_for_steps(run, self.folder, self.rng.randrange(1, 10))
                time.sleep(0.5 * self.rng.random())
            else:
                time.sleep(12 * self.rng.random())
            processes = run.processes() if self.num_processes else []
            victim = self.rng.randrange(-1, len(processes)) if processes else -1
            killed = time.monotonic()
            os.kill(processes[victim] if victim >= 0 else run.popen.pid, signal.SIGKILL)
            code = run.end(120)
            wait_until_none_runs(processes, 30)
            if victim < 0:
                assert code == -signal.SIGKILL, run.said
            else:
                assert code == 128 + signal.SIGKILL, run.said
                for process in {*range(self.num_processes)} - {victim}:
                    self.naming.append(self._named(run, process, victim) - killed)
        finally:
            run.end(0) if run.popen.poll() is not None else run.popen.kill()
        self._look(run)

    def interrupt(self, number: signal.Signals) -> None:
        """Starts the run and sends a signal to it while it makes steps: to the command, or to one
        of its processes."""
        run = start(self.words)
        try:
            wait_for_steps(run, self.folder)
            pids = [run.popen.pid, *(run.processes() if self.num_processes else [])]
            os.kill(self.rng.choice(pids), number)
            assert run.end(120) == 128 + number, run.said
            wait_until_none_runs(pids, 30)
        finally:
            run.popen.kill()
        assert re.search(r"stopped after step \d+: start again to go on", run.said), run.said
        self._look(run)

    def _named(self, run: Run, process: int, victim: int) -> float:
        """When a process had named another one that was killed."""
        name = f"jaxpipe: process {process}: process {victim} has ended by SIGKILL"
        own = f"jaxpipe: process {process}: "  # or else what it was waiting for, and from whom
        times = [at for at, line in run.lines if name in line]
        others = [at for at, line in run.lines if own in line and f"process {victim}" in line]
        found = times + others
        assert found, f"process {process} does not name process {victim}:\n{run.said}"
        return min(found)

    def _look(self, run: Run) -> None:
        self.said.append(run.said)
        if num_steps(self.folder):
            self.seen |= set(enumerate(losses(self.folder)))
