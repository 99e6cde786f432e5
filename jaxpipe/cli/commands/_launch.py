"""`jaxpipe launch` trains in several processes on one machine."""

import argparse
import os
import socket
import sys
from collections.abc import Sequence

from .._options import (
    add_devices,
    add_settings,
    add_verbose,
    bounded_float,
    bounded_integer,
    read_settings,
    text,
)
from ..job import ADDRESS, NUM_PROCESSES, PROCESS, first_failure, started_processes
from ..process import USER_ERROR
from ._compile import leave_devices_alone

_HELP = "train a model in several processes on this machine, or print the job of a cluster"
_CLUSTER_RESTARTS = 20


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("launch", help=_HELP, description=_HELP.capitalize() + ".")
    parser.add_argument(
        "--processes", type=bounded_integer(1, 1024), metavar="N", help="how many, on this machine"
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
        metavar="N",
        help="how often all start again, from the newest checkpoint, when a process dies (0; with "
        f"--print {_CLUSTER_RESTARTS})",
    )
    parser.add_argument(
        "--print",
        choices=("slurm", "jobset", "xpk"),
        help="print the file with which a cluster trains instead: a script for SLURM's sbatch, a "
        "JobSet of Kubernetes, or a script for xpk",
    )
    add_devices(parser, "those of this machine")
    parser.add_argument("--image", type=text, metavar="NAME", help="of containers with jaxpipe")
    parser.add_argument(
        "--storage",
        type=text,
        metavar="NAME",
        help="the volume of `output_dir`: a claim of Kubernetes, or a storage of xpk",
    )
    add_settings(parser)
    add_verbose(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Runs `jaxpipe train` in every process, or prints the file of a job."""
    if args.print:
        return _print_file(args)
    if args.processes is None:
        raise ValueError("`--processes` is missing. Say how many, or `--print` a cluster's file.")
    for name in ("devices", "image", "storage"):
        if getattr(args, name):
            raise ValueError(f"`--{name}` is for `--print`, which is missing. Give both.")
    # Process 0 has the terminal; lines of the others are printed with their number, on standard
    # error. The signals that end a run reach all processes once. No process outlives this one.
    read_settings(args.settings)  # so that an error in them is printed once
    max_restarts = args.max_restarts or 0
    for restart in range(1, max_restarts + 2):
        # The address is a new one each time: the port of a process that was killed may be taken.
        words = [*args.settings, *(["--verbose"] if args.verbose else [])]
        commands = _commands(words, args.processes, args.gpus_per_process)
        with started_processes(commands) as job:
            code = first_failure(job, args.grace)
        if code in (0, USER_ERROR) or job.signals or restart > max_restarts:
            break
        which = f"restart {restart} of {max_restarts}"
        print(f"jaxpipe: the job starts again from its newest checkpoint: {which}", file=sys.stderr)
    return code


def _print_file(args: argparse.Namespace) -> int:
    """Prints the file of a job for a cluster."""
    leave_devices_alone()
    from ...planner import parse_devices
    from ..job_files import cluster_job, jobset_file, slurm_file, xpk_file

    if not args.devices:
        raise ValueError("`--print` needs `--devices`, such as v5p-64 or h100:4x8.")
    for name in ("processes", "gpus_per_process"):
        if getattr(args, name):
            option = name.replace("_", "-")
            raise ValueError(f"`--{option}` is given, and each host has one process. Leave it out.")
    job = cluster_job(
        args.settings,
        parse_devices(args.devices, args.num_slices),
        max_restarts=_CLUSTER_RESTARTS if args.max_restarts is None else args.max_restarts,
        image=args.image or "",
        storage=args.storage or "",
    )
    files = {"slurm": slurm_file, "jobset": jobset_file, "xpk": xpk_file}
    print(files[args.print](job), end="")
    return 0


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
