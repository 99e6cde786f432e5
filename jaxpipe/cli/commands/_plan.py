"""`jaxpipe plan` says how to spread a training step over devices, in seconds and without them."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from ..._durable import failing_writes
from .._options import (
    add_devices,
    add_settings,
    bounded_float,
    bounded_integer,
    path,
    read_values,
    text,
)
from ..process import emulate_devices, quiet_stderr
from ._compile import leave_devices_alone

if TYPE_CHECKING:  # slow imports happen when a command runs
    from ...planner import Plans, VerifiedPlan

_HELP = "say how to spread a training step over devices: what fits, and what takes least time"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("plan", help=_HELP, description=_HELP.capitalize() + ".")
    add_settings(parser)
    add = parser.add_argument
    add_devices(parser)
    add("--hf", type=path, metavar="FOLDER", help="the model of a Hugging Face config.json")
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
    """Plans, and prints a table."""
    if args.devices != "here":
        leave_devices_alone()
    from ...train.planning import plan

    values = read_values(args.settings)
    if args.hf:
        from ...hugging_face import model_keys

        values = {**model_keys(args.hf), **values}
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
        what = f"`--write` is {args.write}, which cannot be written"
        with failing_writes(what, "Give another file."):
            args.write.write_text(plans.yaml(), encoding="utf-8")
    verified = (_verified(plans, index) for index in range(min(args.verify, len(plans.plans))))
    if args.json:
        records = [{"refused": v} if isinstance(v, str) else v.record() for v in verified]
        print(json.dumps(plans.record() | ({"verified": records} if records else {}), indent=1))
        return 0
    print(plans)
    if args.write:
        print(f"{args.write} has the settings of plan 1: jaxpipe train {args.write}")
    for number, figures in enumerate(verified, start=1):
        refused = f"refused. {figures}" if isinstance(figures, str) else figures
        print(f"compiled {number}: {refused}", flush=True)
    return 0


def _verified(plans: "Plans", index: int) -> "VerifiedPlan | str":
    """Returns the figures of the compiler, or the reason that it or the trainer refuses a plan."""
    from ...train.logs import compiling

    try:
        with quiet_stderr(), compiling(sys.stderr, "the train step", say_end=False):
            return plans.verify(index)
    except (ValueError, RuntimeError) as error:  # the others are still to be compiled
        return str(error)
