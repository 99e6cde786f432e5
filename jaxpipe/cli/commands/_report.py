"""`jaxpipe report` writes a run as one HTML page."""

import argparse
import webbrowser
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ..._durable import failing_writes, write_output
from .._options import add_devices, add_verbose, path, topology_name
from ..process import emulate_devices, quiet_stderr
from ._compile import leave_devices_alone

if TYPE_CHECKING:
    from ...report import CompiledMemory
    from ...report.record import RunRecord
    from ...train.plan import Setup, StepPlan

_HELP = "write a run, or several beside each other, as one page of HTML"
_MAX_DEVICES = 1024  # more take minutes to be emulated


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("report", help=_HELP, description=_HELP.capitalize() + ".")
    add = parser.add_argument
    add("run", type=path, nargs="+", metavar="RUN", help="the folder `output_dir/run_name`")
    add(
        "--output",
        type=path,
        metavar="FILE",
        help="default: RUN/report.html; of several runs comparison.html beside the first",
    )
    add("--compile", action="store_true", help="compile the step too, for its exact memory")
    add_devices(parser, "CPUs")
    add("--open", action="store_true", help="show it in a browser")
    add_verbose(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Writes the page of some runs; a single run is planned again on emulated devices."""
    if args.devices and not args.compile:
        raise ValueError(f"`--devices` is {args.devices} without `--compile`. Give both.")
    if args.num_slices != 1 and not args.devices:
        raise ValueError(f"`--num-slices` is {args.num_slices} without `--devices`. Give both.")
    if len(args.run) > 1:
        output, page = args.output or args.run[0].parent / "comparison.html", _comparison(args)
    else:
        output, page = args.output or args.run[0] / "report.html", _page(args)
    with failing_writes(f"`--output` is {output}, which cannot be written", "Give another."):
        write_output(output, page)
    print(f"{output}: {len(page.encode()) / 1e3:.0f} kB")
    if args.open:
        webbrowser.open(output.absolute().as_uri())
    return 0


def _comparison(args: argparse.Namespace) -> str:
    from ...report import read_run
    from ...report.comparison import render_comparison

    if args.compile:
        raise ValueError(f"`--compile` is for a page on one run, and there are {len(args.run)}.")
    return render_comparison([read_run(run) for run in args.run], now=datetime.now(UTC))


def _page(args: argparse.Namespace) -> str:
    from ...report import read_run, render

    topology = None
    if args.devices:
        leave_devices_alone()
        topology = topology_name(args.devices)
    record = read_run(args.run[0])
    setup, why = _planned(record)
    compiled = None
    if args.compile:
        compiled = _compiled(record, setup and setup.step, why, topology, args.num_slices)
    return render(record, setup, now=datetime.now(UTC), why_no_setup=why, compiled=compiled)


def _planned(record: "RunRecord") -> "tuple[Setup | None, str]":
    """Plans the run on emulated devices; returns the plan, or None and why it cannot be planned."""
    from ...train import set_up

    count = record.num_devices
    if record.config is None:
        return None, "Unknown: this version of jaxpipe does not take the configuration."
    if count is None:
        return None, "Unknown: nothing says on how many devices the run was."
    if count > _MAX_DEVICES:
        return None, f"Not computed for more than {_MAX_DEVICES} devices."
    import jax

    try:
        emulate_devices(count)
        # The kernels of TPUs change no shape.
        on_any = {"attention": "dot_product", "megablox": "auto"}
        return set_up(record.config.model_copy(update=on_any), jax.devices()), ""
    except (ValueError, FileNotFoundError) as error:
        return None, f"The run cannot be planned here: {error}"


def _compiled(
    record: "RunRecord", plan: "StepPlan | None", why: str, topology: str | None, num_slices: int
) -> "CompiledMemory":
    """Compiles the step for a topology or for the emulated devices, and returns its memory."""
    from ...report import CompiledMemory
    from ...train import compile_train_step, set_up
    from ...train.step import check_single_program
    from ...xla import memory, topology_devices

    if plan is None or record.config is None:
        raise ValueError(f"`--compile` needs a run that can be planned. {why}")
    check_single_program(plan.engine)
    if topology:
        with quiet_stderr():
            devices = topology_devices(topology, num_slices)
        plan = set_up(record.config, devices).step
    device = plan.pipeline.mesh.devices.flat[0]
    step_memory = memory(compile_train_step(plan), device.platform)
    return CompiledMemory(step_memory, device.device_kind)
