"""Runs `jaxpipe COMMAND`, and reports a user's mistake in one message."""

import io
import os
import sys
from typing import NoReturn

from .process import (
    INTERRUPTED,
    hide_logged_tracebacks,
    report_error,
    say_interrupted,
    set_log_levels,
    watch_interrupts,
)


def script() -> NoReturn:
    """Runs the command `jaxpipe` with the arguments of this process, and exits."""
    watch_interrupts()
    if "--verbose" not in sys.argv:
        set_log_levels(os.environ)
        hide_logged_tracebacks()
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if code in (1, INTERRUPTED):
        # At once: threads of a failed save would print more errors after the reason.
        os._exit(code)
    sys.exit(code)


def main(argv: list[str] | None = None) -> int:
    """Runs a command of jaxpipe.

    Args:
        argv: The words after `jaxpipe`, or None for those of this process.

    Returns:
        The exit code: 0 for success, 2 if the user has to change something, 1 if a run ends early
        for a reason that it prints, 130 after Ctrl-C.

    Raises:
        SystemExit: If an argument is unknown or wrong, after a message.

    Example:
        >>> main(["schedule", "export", "gpipe", "--ranks=2", "--microbatches=2"])
        0F0,0F1,0B0,0B1
        1F0,1F1,1B0,1B1
        0
    """
    # Not at the top: `jaxpipe.cli` also has `emulate_devices`, which must run before other imports.
    from .commands import parse

    args = parse(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may not know all characters
    try:
        code = args.func(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return say_interrupted()
    except BrokenPipeError:
        # The reader of the output has closed it. The rest must not be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return report_error(error, args.command)
