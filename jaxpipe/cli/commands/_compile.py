"""`jaxpipe compile` reports memory and communication of a train step, without its devices."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._durable import failing_writes
from .._options import (
    add_devices,
    add_settings,
    add_verbose,
    bounded_integer,
    path,
    read_settings,
    topology_name,
)
from ..process import check_address_space, emulate_devices, quiet_stderr
from ._flags import print_flags, probe_flags

if TYPE_CHECKING:
    from ...train.plan import StepPlan

_HELP = "compile the train step, and report memory and communication, without the hardware"

# libtpu asks the cloud's metadata server for its topology, and locks out a second process.
_OFF_DEVICES = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("compile", help=_HELP, description=_HELP.capitalize() + ".")
    add_settings(parser)
    add = parser.add_argument
    add_devices(parser, "this machine's")
    add(
        "--top",
        type=bounded_integer(0, 10_000),
        default=0,
        metavar="N",
        help="list the N instructions that take most of a step",
    )
    add("--print-flags", action="store_true", help="print the compiler's flags with the reasons")
    add(
        "--probe-flags",
        action="store_true",
        help="compile with each group of flags, and compare what they make asynchronous",
    )
    add("--json", action="store_true", help="print one JSON object")
    add("--dump-hlo", type=path, metavar="DIR", help="write the optimized HLO text into DIR")
    add_verbose(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Compiles the train step and prints a report."""
    if args.devices not in (None, "here"):
        leave_devices_alone()
    topology = topology_name(args.devices)
    config = read_settings(args.settings)
    check_address_space(config.emulate_devices)
    with quiet_stderr(verbose=args.verbose):
        devices = _devices(topology, args.num_slices, config.emulate_devices)
    if args.print_flags:
        return print_flags(config, devices[0])
    dump = args.dump_hlo and _dump_file(args.dump_hlo, config.model_name, topology)
    from ...train import set_up
    from ...train.logs import describe
    from ...train.step import check_single_program, does_not_fit
    from ...xla.compile_report import report_json, report_text

    setup = set_up(config, devices)
    check_single_program(setup.step.engine)
    if args.probe_flags:
        return probe_flags(setup, lambda step: _compile(step)[0], as_json=args.json)
    report, hlo_text = _compile(setup.step)
    if dump:
        dump.write_text(hlo_text, encoding="utf-8")
    if args.json:
        print(report_json(report, num_dearest=args.top))
    else:
        print(f"{describe(setup, 0)}\n{report_text(report, num_dearest=args.top)}")
    if report.fits is False:  # XLA:GPU refuses nothing
        peak = f"its peak is {report.memory.peak_bytes / 1e6:,.0f} MB."
        raise ValueError(does_not_fit(peak))
    return 0


def leave_devices_alone() -> None:
    """Makes compilers leave this machine's devices alone; call it before JAX is used."""
    for name, value in _OFF_DEVICES.items():
        os.environ.setdefault(name, value)


def _devices(topology: str | None, num_slices: int, num_emulated: int) -> list[Any]:
    """Returns the devices of the topology or of this machine, emulated if the config says so."""
    if topology:
        if num_emulated:
            raise ValueError(
                f"`emulate_devices` is {num_emulated} and `--devices` {topology}. Leave "
                "one of them out."
            )
        from ...xla import topology_devices

        return topology_devices(topology, num_slices)
    if num_slices != 1:
        raise ValueError(f"`--num-slices` is {num_slices} without `--devices`. Give both.")
    if num_emulated:
        emulate_devices(num_emulated)
    import jax

    return jax.devices()


def _dump_file(folder: Path, model_name: str, topology: str | None) -> Path:
    """Returns the file for the HLO, after checking that it can be written."""
    where = (topology or "this-machine").replace(":", "-")
    file = folder / f"{model_name}-{where}-train-step.hlo"
    what = f"`--dump-hlo` is {folder}, where {file.name} cannot be written"
    with failing_writes(what, "Give a folder of your own."):
        folder.mkdir(parents=True, exist_ok=True)
        file.touch()
    return file


def _compile(plan: "StepPlan") -> tuple[Any, str]:
    """Compiles a step, and returns its report and its HLO."""
    from ...train.logs import compiling
    from ...train.step import report_train_step

    with compiling(sys.stderr, "the train step", say_end=False):
        return report_train_step(plan)
