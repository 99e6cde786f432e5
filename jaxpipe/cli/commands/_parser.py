"""Parses the words after `jaxpipe`: lists the commands, whose modules add their own options."""

import argparse
import sys

from ..._input import short_repr
from .._options import Parser
from . import _compile, _convert, _launch, _plan, _report, _sample, _schedule, _tokenize, _train

_COMMANDS = (_schedule, _plan, _train, _launch, _compile, _convert, _tokenize, _report, _sample)
"""The modules of all commands, in the order in which the help lists them.

Each has a function `add_parser` that registers the parser of its command. The parser's `func`
default takes the parsed arguments and returns the exit code. It imports slow modules, such as JAX,
itself.
"""


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands; `func` of its arguments runs a command."""
    parser = Parser(prog="jaxpipe", description="Pipeline parallelism for JAX.")
    subparsers = parser.add_subparsers(required=True, metavar="command", dest="command")
    for command in _COMMANDS:
        command.add_parser(subparsers)
    return parser


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the parsed arguments. Settings may come before, between and after options."""
    parser = make_parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    args, rest = parser.parse_known_args(argv)
    if any(word.startswith("-") for word in rest) or (rest and not hasattr(args, "settings")):
        parser.error(
            f"unrecognized arguments: {' '.join(map(short_repr, rest))}. `jaxpipe {args.command} "
            "--help` lists the options."
        )
    if rest:
        args.settings += rest
    return args
