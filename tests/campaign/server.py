"""Runs commands, each in a fork of a process that has imported everything. A program.

It reads a JSON object a line, {"argv": [...], "cwd": "...", "fault": ...}, and answers with one:
exit code, what was written to standard error, seconds, and the most memory that was used. The fault
is null, and the command ends where long work would begin; or it is the name and the time of what
goes wrong while the whole command runs, or [] if nothing does.
"""

import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from importlib import import_module

from quick import ENVIRONMENT

from .faults import arrange

# Beyond the bounds that the campaign asserts, so that it sees how far beyond.
_SECONDS, _ADDRESS_SPACE = 90, 14 << 30
_IMPORTED = (
    *(
        "orbax.checkpoint",
        "jaxpipe.cli.commands",
        "jaxpipe.linen",
        "jaxpipe.nnx",
        "jaxpipe.xla",
    ),
    *("jaxpipe.report", "jaxpipe.train", "jaxpipe.hugging_face"),
    *("jaxpipe.train.plan._flax_layer", "jaxpipe.train.loop._loop"),
)


class Checked(BaseException):
    """Everything about a command's input has been checked; what follows takes minutes."""


def stop_before_long_work() -> None:
    """Commands end where a run or a sample would compile, or start processes."""
    import subprocess

    from jaxpipe.cli.commands import _compile
    from jaxpipe.train.checkpoint import _init_from as _start
    from jaxpipe.train.loop import _loop
    from jaxpipe.train.sampling import _prompts

    def checked(*args: object, **named: object) -> None:
        raise Checked

    _compile._compile = checked
    _start.init_state = checked
    _loop.restore_state = checked
    _prompts.jit_on_mesh = checked
    subprocess.Popen = checked


def import_everything() -> None:
    """What commands import when they run."""
    from jax._src import xla_bridge

    for name in _IMPORTED:
        import_module(name)
    assert not xla_bridge.backends_are_initialized(), "a fork needs a JAX of its own"


def run(argv: list[str]) -> int:
    """Runs a command as the shell would, and returns its exit code."""
    from jaxpipe.cli import main

    try:
        code = main(argv)
        return code if isinstance(code, int) else 99
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 0
    except Checked:
        return 0
    except BaseException:
        traceback.print_exc()
        return 70


def prepare(argv: list[str], fault: list | None) -> None:
    """Makes this process, a fork, one in which a command runs."""
    from jaxpipe.cli.process import watch_interrupts

    if fault is None:
        stop_before_long_work()
        return
    os.environ |= ENVIRONMENT
    signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored in the background
    watch_interrupts()
    if fault:
        arrange(*fault, in_a_run=argv[0] == "train")


def in_a_fork(argv: list[str], cwd: str, fault: list | None = None) -> dict[str, object]:
    """Runs a command in a fork, and returns what it did."""
    out, into = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(cwd)
        nothing = os.open(os.devnull, os.O_RDWR)
        for new, old in ((nothing, 0), (nothing, 1), (into, 2)):
            os.dup2(new, old)
        os.close(out)
        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        prepare(argv, fault)
        code = run(argv)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    os.close(into)
    said, size, deadline = b"", 0, started + _SECONDS
    while (left := deadline - time.monotonic()) > 0:
        if select.select([out], [], [], left)[0]:
            piece = os.read(out, 1 << 16)
            if not piece:
                break
            size += len(piece)
            said += piece if len(said) < 1 << 16 else b""
    else:
        os.killpg(child, signal.SIGKILL)
    os.close(out)
    _, status, usage = os.wait4(child, 0)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "said": said.decode("utf-8", "replace"),
        "size": size,
        "seconds": time.monotonic() - started,
        "cpu": usage.ru_utime + usage.ru_stime,
        "bytes": usage.ru_maxrss * 1024,
    }


if __name__ == "__main__":
    from jaxpipe.cli.process import hide_logged_tracebacks

    import_everything()
    hide_logged_tracebacks()  # as the command does
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        answers.write(json.dumps(in_a_fork(**json.loads(line))) + "\n")
        answers.flush()
