"""The pipe from `jaxpipe launch` to each process tells which others, or the launcher, have ended.

Each process inherits the reading end of a pipe. A line in it names another process that has ended;
the end of the pipe says that the launcher has, however it ended. On Linux the kernel also kills the
processes of a launcher that ends, even those that are stopped.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..._exit import exit_immediately

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
