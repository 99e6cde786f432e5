"""Runs `jaxpipe COMMAND`, and reports a user's mistake in one message."""

import argparse
import io
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from .._input import short_repr
from ._errors import hide_logged_tracebacks, report_error
from ._interrupts import INTERRUPTED, say_interrupted, watch_interrupts
from ._options import Parser


def commands() -> tuple[Callable[[argparse._SubParsersAction], None], ...]:
    """Returns one function per command, which registers a parser.

    The parser's `func` default takes the parsed arguments and returns the exit code. It imports
    slow modules, such as JAX, itself.
    """
    # Not at the top: `jaxpipe.cli` also has `emulate_devices`, which must run before other imports.
    from .commands import _compile, _convert, _launch, _report, _schedule, _tokenize, _train

    return (
        _schedule.add_parser,
        _train.add_parser,
        _launch.add_parser,
        _compile.add_parser,
        _convert.add_parser,
        _tokenize.add_parser,
        _report.add_parser,
    )


def script() -> NoReturn:
    """Runs the command `jaxpipe` with the arguments of this process, and exits."""
    watch_interrupts()
    hide_logged_tracebacks()
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if code in (1, INTERRUPTED):
        # At once: threads of a failed save would print more errors after the reason.
        os._exit(code)
    sys.exit(code)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = Parser(prog="jaxpipe", description="Pipeline parallelism for JAX.")
    subparsers = parser.add_subparsers(required=True, metavar="command", dest="command")
    for add_parser in commands():
        add_parser(subparsers)
    return parser


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the parsed arguments. Settings may come before, between and after options.

    Args:
        argv: The words after `jaxpipe`, or None for those of this process.

    Returns:
        The arguments; `func` is the function to call with them.

    Raises:
        SystemExit: If an argument is unknown or wrong, after a message.
    """
    parser = make_parser()
    args, rest = parser.parse_known_args(argv)
    if any(word.startswith("-") for word in rest) or (rest and not hasattr(args, "settings")):
        parser.error(f"unrecognized arguments: {' '.join(map(short_repr, rest))}")
    if rest:
        args.settings += rest
    return args


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
