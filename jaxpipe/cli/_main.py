"""`jaxpipe COMMAND`: finds the command and turns what a user did wrong into one message."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from ._interrupts import INTERRUPTED, interruptible, say_interrupted, watch_interrupts
from ._processes import is_run_error


def commands() -> tuple[Callable[[argparse._SubParsersAction], None], ...]:
    """One function per command, which registers a parser.

    The parser's `func` default takes the parsed arguments and returns the exit code. What is slow
    to import, such as JAX, that function imports.
    """
    # Not at the top: `jaxpipe.cli` also has `emulate_devices`, which must run before all else.
    from . import _compile, _convert, _launch, _report, _schedule, _tokenize, _train

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
    """The command `jaxpipe`."""
    watch_interrupts()
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if code in (1, INTERRUPTED):
        # At once: threads of a save that failed would have more to say than the reason.
        os._exit(code)
    sys.exit(code)


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit code: 2 where the user has to change something.

    1 where a run ends before its time for a reason that it names, 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog="jaxpipe", description="Pipeline parallelism for JAX.")
    subparsers = parser.add_subparsers(required=True, metavar="command")
    for add_parser in commands():
        add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        with interruptible():
            return args.func(args)
    except KeyboardInterrupt:
        return say_interrupted()
    except FileNotFoundError as error:
        return _fail(f"{error.filename}: no such file.")
    except ValueError as error:
        return _fail(str(error))
    except RuntimeError as error:
        if is_run_error(error):
            return _fail(str(error), code=1)
        if "No such compile option" not in str(error):  # what JAX makes of XLA's error
            raise
        return _fail(f"`compile_xla_flags` has an option that XLA does not know: {error}")


def _fail(message: str, *, code: int = 2) -> int:
    print(f"jaxpipe: error: {message}", file=sys.stderr)
    return code
