"""`jaxpipe train` trains a model in this process."""

import argparse
import os
from typing import TYPE_CHECKING

from .._options import add_settings, add_verbose, read_settings
from ..job import PROCESS, follow_launcher, join_processes, leaving_on_error
from ..process import check_address_space, emulate_devices, keep_freed_memory, use_compile_cache
from ._flags import print_flags

if TYPE_CHECKING:
    from ...train import Config

_HELP = "train a model, set up by YAML files and key=value pairs; pairs win over files"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("train", help=_HELP, description=_HELP.capitalize() + ".")
    add_settings(parser)
    parser.add_argument("--keys", action="store_true", help="print every key with its default")
    parser.add_argument(
        "--print-flags", action="store_true", help="print the compiler's flags with the reasons"
    )
    add_verbose(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Trains; processes join and devices are emulated before JAX looks for devices.

    The exit code is 143 if SIGTERM has ended the run before its last step, 130 after SIGINT and 129
    after SIGHUP, so that a scheduler that restarts failed jobs resumes it.
    """
    follow_launcher(f"process {os.environ.get(PROCESS, 0)}")
    import jax

    from ...train import train
    from ...train.config import defaults_yaml
    from ...train.runtime import TerminatedError

    if args.keys:
        print(defaults_yaml())
        return 0
    config = read_settings(args.settings)
    check_address_space(config.emulate_devices)
    if args.print_flags:
        return _print_flags(config)
    join_processes(detect=config.distributed)
    with leaving_on_error():
        if config.emulate_devices:
            emulate_devices(config.emulate_devices)
        if jax.default_backend() == "cpu":
            keep_freed_memory()
        if config.jax_cache_dir == "auto":
            use_compile_cache()
        try:
            train(config, keep_history=False)
        except TerminatedError as error:  # it has printed the reason
            return 128 + error.signal
    return 0


def _print_flags(config: "Config") -> int:
    """Prints the flags for the devices of this process; others of the run have equal devices."""
    if config.emulate_devices:
        emulate_devices(config.emulate_devices)
    import jax

    return print_flags(config, jax.local_devices()[0])
