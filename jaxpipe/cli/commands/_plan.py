"""`jaxpipe plan` says how to spread a training step over devices, in seconds and without them."""

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._durable import failed_write
from ..._input import read_text
from .._options import bounded_float, bounded_integer, path, text
from .._settings import add_settings, is_config_file
from ..process import emulate_devices, quiet_stderr
from ._compile import _compile as compile_step
from ._compile import leave_devices_alone

if TYPE_CHECKING:  # slow imports happen when a command runs
    from ...planner._answer import Plans

_HELP = "say how to spread a training step over devices: what fits, and what takes least time"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Registers the command."""
    parser = subparsers.add_parser("plan", help=_HELP, description=_HELP.capitalize() + ".")
    add_settings(parser)
    add = parser.add_argument
    add(
        "--devices",
        type=text,
        required=True,
        metavar="NAME",
        help="such as v5p-64, v6e:4x4, h100:2x8 (hosts and devices of each), or here",
    )
    add("--num-slices", type=bounded_integer(1, 4096), default=1, metavar="N", help="slices of it")
    add(
        "--batch",
        type=bounded_integer(1, 10**9),
        metavar="N",
        help="sequences of a step; else per_device_batch_size times the devices",
    )
    add(
        "--sequence",
        type=bounded_integer(1, 10**8),
        metavar="N",
        help="tokens of a sequence; else max_target_length",
    )
    add(
        "--memory-gb",
        type=bounded_float(1e-3, 1e6),
        metavar="X",
        help="the memory of a device that may be used; else 95%% of it",
    )
    add(
        "--max-stages",
        type=bounded_integer(1, 10_000),
        metavar="N",
        help="most ranks of a pipeline",
    )
    add("--schedule", type=text, metavar="NAME", help="the schedule; else any")
    add("--top", type=bounded_integer(1, 100), default=5, metavar="N", help="plans to list")
    add("--json", action="store_true", help="print one JSON object")
    add(
        "--verify",
        type=bounded_integer(0, 100),
        default=0,
        metavar="N",
        help="compile the best N, and print predicted beside compiled; minutes each",
    )
    add("--write", type=path, metavar="FILE.yml", help="write the best plan for `jaxpipe train`")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Plans, and prints a table.

    Args:
        args: The parsed arguments.

    Returns:
        The exit code.

    Raises:
        ValueError: If the settings are wrong, or nothing fits.
    """
    if args.devices != "here":
        leave_devices_alone()
    from ...planner import plan
    from ...planner._request import read_settings
    from ...train.config import MAX_YAML_BYTES

    files = [given for given in args.settings if is_config_file(given)]
    pairs = [given for given in args.settings if given not in files]
    texts = [read_text(file, most_bytes=MAX_YAML_BYTES) for file in files]
    values = read_settings(texts, pairs)
    if args.devices == "here" and values.get("emulate_devices"):
        emulate_devices(int(values["emulate_devices"]))
    plans = plan(
        values,
        args.devices,
        args.batch,
        args.sequence,
        num_slices=args.num_slices,
        memory_gb=args.memory_gb,
        max_stages=args.max_stages,
        schedule=args.schedule,
        num_plans=args.top,
    )
    if args.write:
        _write(args.write, plans.yaml())
    if args.json:
        verified = [_verified(plans, index) for index in range(min(args.verify, len(plans.plans)))]
        print(json.dumps(plans.record() | ({"verified": verified} if verified else {}), indent=1))
        return 0
    print(plans)
    for index in range(min(args.verify, len(plans.plans))):
        print(_line(index, plans, _verified(plans, index)), flush=True)
    return 0


def _verified(plans: "Plans", index: int) -> dict[str, Any]:
    """Compiles the step of a plan, as `jaxpipe compile --topology` does.

    Returns:
        The peak in bytes, the busy seconds on TPUs, and the seconds of compiling; or why XLA or the
        trainer refuses the step.
    """
    from ...planner._devices import absent_devices
    from ...planner._keys import checked_setup
    from ...train.step._aot import check_single_program
    from ...xla import topology_devices

    wanted, settings = plans.request.devices, plans.plans[index].settings
    started = time.perf_counter()
    try:
        with quiet_stderr():
            devices = (
                absent_devices(wanted)
                if wanted.are_here
                else topology_devices(wanted.topology, wanted.num_slices)
            )
        setup = checked_setup(settings, devices)
        check_single_program(setup.step.engine)
        report, _ = compile_step(setup.step)
    except (ValueError, RuntimeError) as error:  # the others are still to be compiled
        return {"refused": str(error)}
    found = report.step_time
    return {
        "peak_bytes": report.memory.peak_bytes,
        "busy_seconds": None if found is None else sum(found.busy_seconds.values()),
        "step_seconds": None if found is None else found.seconds,
        "compile_seconds": time.perf_counter() - started,
    }


def _line(index: int, plans: "Plans", found: dict[str, Any]) -> str:
    """Returns a line with what is predicted of a plan beside what the compiler says."""
    if "refused" in found:
        return f"compiled {index + 1}: refused. {found['refused']}"
    plan = plans.plans[index]
    predicted, peak = plan.memory.total, found["peak_bytes"]
    time_of_step = ""
    if found["step_seconds"] is not None:
        time_of_step = (
            f"; {plan.time.seconds:.3f} s predicted, {found['step_seconds']:.3f} by the "
            f"compiler's cycles, {found['busy_seconds']:.3f} of them busy"
        )
    return (
        f"compiled {index + 1}: {predicted / 1e9:.3f} GB predicted, {peak / 1e9:.3f} compiled "
        f"({predicted / peak - 1:+.1%}){time_of_step}; {found['compile_seconds']:.0f} s to compile"
    )


def _write(file: Path, settings: str) -> None:
    try:
        file.write_text(settings, encoding="utf-8")
    except OSError as error:
        raise failed_write(
            f"`--write` is {file}, which cannot be written: {error.strerror}. Give another file.",
            error,
        ) from None
