"""`jaxpipe launch` trains in several processes on one machine."""

import argparse
import os
import socket
import sys
from collections.abc import Sequence

from .._options import add_settings, add_verbose, bounded_float, bounded_integer, read_settings
from ..job import ADDRESS, NUM_PROCESSES, PROCESS, first_failure, started_processes

_HELP = "train a model in several processes on this machine"
_USER_ERROR = 2
"""The exit code of a user's mistake, which a restart does not repair."""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("launch", help=_HELP, description=_HELP.capitalize() + ".")
    parser.add_argument(
        "--processes", type=bounded_integer(1, 1024), required=True, metavar="N", help="how many"
    )
    parser.add_argument(
        "--gpus-per-process",
        type=bounded_integer(1, 64),
        metavar="K",
        help="process i uses the GPUs i K to (i+1) K-1",
    )
    parser.add_argument(
        "--grace",
        type=bounded_float(0, 1e6),
        default=15.0,
        metavar="SECONDS",
        help="how long the others may go on when one has failed (15)",
    )
    parser.add_argument(
        "--max-restarts",
        type=bounded_integer(0, 10**6),
        default=0,
        metavar="N",
        help="how often all start again, from the newest checkpoint, when a process dies (0)",
    )
    add_settings(parser)
    add_verbose(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Runs `jaxpipe train` in every process."""
    # Process 0 has the terminal; lines of the others are printed with their number, on standard
    # error. The signals that end a run reach all processes once. No process outlives this one.
    read_settings(args.settings)  # so that an error in them is printed once
    for restart in range(1, args.max_restarts + 2):
        # The address is a new one each time: the port of a process that was killed may be taken.
        words = [*args.settings, *(["--verbose"] if args.verbose else [])]
        commands = _commands(words, args.processes, args.gpus_per_process)
        with started_processes(commands) as job:
            code = first_failure(job, args.grace)
        if code in (0, _USER_ERROR) or job.signals or restart > args.max_restarts:
            break
        which = f"restart {restart} of {args.max_restarts}"
        print(f"jaxpipe: the job starts again from its newest checkpoint: {which}", file=sys.stderr)
    return code


def _commands(
    words: Sequence[str], num_processes: int, num_gpus: int | None
) -> list[tuple[list[str], dict[str, str]]]:
    """Returns the arguments and the environment of every process."""
    address = f"127.0.0.1:{_free_port()}"
    command = [sys.executable, "-m", "jaxpipe", "train", *words]
    commands = []
    for process in range(num_processes):
        job = {ADDRESS: address, NUM_PROCESSES: str(num_processes), PROCESS: str(process)}
        if num_gpus:
            mine = range(process * num_gpus, (process + 1) * num_gpus)
            job["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, mine))
        commands.append((command, {**os.environ, **job}))
    return commands


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
