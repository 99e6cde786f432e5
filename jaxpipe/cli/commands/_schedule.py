"""`jaxpipe schedule` lists, shows, exports, simulates, checks and searches, without JAX."""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from ... import schedules
from ..._durable import failing_writes, write_output
from ..._input import is_file, short_repr
from ...schedules import FAMILIES, Costs, Schedule, Timeline, num_ranks
from ...schedules.analysis import busy_times, parallelogram_bubble, rectangular_bubble
from ...schedules.builders import get_family
from ...schedules.io import time_unit, to_html
from ...schedules.language import describe, num_slices
from ...schedules.lock_step import simulate_ticks, to_lock_step
from .._options import bounded_float, bounded_integer, path, text

_COUNTS = ("ranks", "microbatches", "chunks", "group", "slices", "latency", "spare")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Registers `schedule` and its sub-commands."""
    parser = subparsers.add_parser(
        "schedule", help="list, show, export, simulate, check, search schedules"
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    command = commands.add_parser("list", help="every schedule, what it takes and asks for")
    command.set_defaults(func=_list)

    command = _with_costs(commands.add_parser("show", help="draw a schedule in the terminal"))
    command.add_argument("--svg", type=path, metavar="FILE", help="write a picture too")
    command.add_argument("--trace", type=path, metavar="FILE", help="write a Perfetto trace too")
    command.add_argument(
        "--html", type=path, metavar="FILE", help="write a page with sliders for the costs too"
    )
    command.add_argument(
        "--compare",
        type=text,
        metavar="NAME_OR_CSV",
        help="another schedule for the page of `--html`, with the same counts",
    )
    command.set_defaults(func=_show)

    command = _with_schedule(commands.add_parser("export", help="write torch's CSV"))
    command.add_argument("--csv", type=path, metavar="FILE", help="instead of standard output")
    command.set_defaults(func=_export)

    command = _with_costs(commands.add_parser("simulate", help="makespan, bubbles and memory"))
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(func=_simulate)

    command = commands.add_parser("check", help="check a CSV: complete, ordered, free of deadlock")
    command.add_argument("file", type=path, metavar="FILE")
    command.set_defaults(func=_check)

    command = _with_search(commands.add_parser("search", help="the fastest within a memory cap"))
    command.set_defaults(func=_search)


def _with_schedule(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the arguments for a schedule."""
    add = parser.add_argument
    add(
        "name",
        type=text,
        metavar="NAME_OR_CSV",
        help="a name of `jaxpipe schedule list`, or a CSV file",
    )
    count = bounded_integer(1, 2**31 - 1)
    add("--ranks", type=count, metavar="P")
    add("--microbatches", type=count, metavar="M")
    add("--chunks", type=count, metavar="V", help="stages per rank")
    add("--group", type=count, metavar="G", help="microbatches that pass a chunk in a row")
    add("--slices", type=count, metavar="S", help="slices per sequence")
    add(
        "--latency",
        type=bounded_float(0, 1e6),
        metavar="L",
        help="of transfers, in actions, for zero_bubble_h2",
    )
    add(
        "--spare",
        type=bounded_integer(0, 10**6),
        metavar="N",
        help="microbatches zero_bubble_h2 may hold in addition",
    )
    return parser


def _with_costs(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the arguments for a schedule and its costs."""
    add = _with_schedule(parser).add_argument
    add(
        "--costs",
        type=text,
        default="1,1,1",
        metavar="F,I,W",
        help="of a stage; 1/2/1/1,... is per stage",
    )
    add("--transfer", type=text, default="0", metavar="T", help="time between ranks")
    add("--lock-step", action="store_true", help="in ticks of all ranks, as one XLA program has it")
    return parser


def _with_search(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the arguments of a search."""
    add, count, size = parser.add_argument, bounded_integer(1, 2**31 - 1), bounded_float(0, 1e18)
    add("--ranks", type=count, metavar="P", required=True)
    add("--microbatches", type=count, metavar="M", required=True)
    add("--costs", type=text, default="1,1,1", metavar="F,I,W", help="of a whole rank")
    add("--transfer", type=text, default="0", metavar="T", help="time between ranks")
    add(
        "--memory-cap",
        type=size,
        metavar="N",
        help="the most microbatches that a rank may store; default: as many as ranks",
    )
    add("--max-chunks", type=count, default=4, metavar="V", help="the most stages per rank")
    add("--max-slices", type=count, default=1, metavar="S", help="the most slices per sequence")
    kind = parser.add_mutually_exclusive_group().add_argument
    kind("--no-barrier", action="store_true", help="steps follow each other without a barrier")
    kind(
        "--lock-step", action="store_true", help="in ticks of all ranks, as one XLA program has it"
    )
    add("--csv", type=path, metavar="FILE", help="write the schedule in torch's format")
    add("--json", action="store_true", help="print JSON")
    return parser


def _list(args: argparse.Namespace) -> int:
    rows = [("name", "takes", "constraints", "paper")]
    for name, family in FAMILIES.items():
        rows.append((name, " ".join(family.takes), family.constraints, family.paper))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    return 0


def _show(args: argparse.Namespace) -> int:
    if args.compare and not args.html:
        raise ValueError("`--compare` adds a schedule to a page. Give `--html FILE` too.")
    timeline = _timeline(args)
    page = _page(args) if args.html else ""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(schedules.to_text(timeline, time_unit(timeline), max_width=width))
    print(_figures_text(timeline))
    if args.svg:
        _write("svg", args.svg, schedules.to_svg(timeline, args.name))
    if args.trace:
        _write("trace", args.trace, schedules.to_perfetto(timeline))
    if args.html:
        _write("html", args.html, page)
    return 0


def _page(args: argparse.Namespace) -> str:
    """Returns the page of the schedule that is shown, and of the one to compare with it."""
    costs = parse_costs(args.costs, args.transfer)
    shown = {args.name: _schedule(args)}
    if args.compare:
        shown[args.compare] = _schedule(_other(args, shown[args.name]))
    try:
        if args.lock_step:
            return to_html({n: to_lock_step(s, costs) for n, s in shown.items()}, costs)
        return to_html(shown, costs)
    except ValueError as error:
        raise _with_options(error) from None


def _other(args: argparse.Namespace, shown: Schedule) -> argparse.Namespace:
    """Returns the arguments of the schedule to compare: those counts of the first that it takes."""
    counts = dict.fromkeys(_COUNTS)
    if args.compare in FAMILIES:
        taken = {name: getattr(args, name) for name in FAMILIES[args.compare].takes}
        counts |= taken | {"ranks": num_ranks(shown), "microbatches": shown.num_microbatches}
    return argparse.Namespace(name=args.compare, **counts)


def _export(args: argparse.Namespace) -> int:
    exported = schedules.to_csv(_schedule(args))
    if args.csv:
        _write("csv", args.csv, exported)
    else:
        print(exported, end="")
    return 0


def _write(option: str, file: Path, text: str) -> None:
    """Writes the file that an option names."""
    what = f"`--{option}` is {short_repr(str(file))}, which cannot be written"
    with failing_writes(what, "Give a file in an existing folder, on a disk with free space."):
        write_output(file, text)


def _simulate(args: argparse.Namespace) -> int:
    timeline = _timeline(args)
    print(json.dumps(_figures(timeline), indent=2) if args.json else _figures_text(timeline))
    return 0


def _check(args: argparse.Namespace) -> int:
    schedule = schedules.read_csv(args.file)
    print(
        f"{args.file}: {num_ranks(schedule)} ranks, {schedule.num_stages} stages and "
        f"{schedule.num_microbatches} microbatches; complete and free of deadlock."
    )
    return 0


def _search(args: argparse.Namespace) -> int:
    names = ("ranks", "microbatches", "memory_cap", "max_chunks", "max_slices")
    try:
        result = schedules.search(
            args.ranks,
            args.microbatches,
            parse_costs(args.costs, args.transfer),
            args.ranks if args.memory_cap is None else args.memory_cap,
            max_chunks=args.max_chunks,
            max_slices=args.max_slices,
            synchronous=not args.no_barrier,
            lock_step=args.lock_step,
        )
    except ValueError as error:
        ours = {f"`{name}`": f"`--{name.replace('_', '-')}`" for name in names}
        raise _with_options(ValueError(_renamed(str(error), ours))) from None
    if args.csv:
        _write("csv", args.csv, schedules.to_csv(result.schedule))
    figures = {
        "name": " ".join([result.name, *(f"{key}={value}" for key, value in result.arguments)]),
        "schedule": describe(result.schedule),
        "makespan": result.makespan,
        "step_time": result.step_time,
        "bound": result.bound,
        "gap": result.gap,
        "peak_activations": float(result.peak),
    }
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        figures["gap"] = f"{result.gap:.2%} above the bound"
        for name, value in figures.items():
            print(f"{name.replace('_', ' '):18}{value if isinstance(value, str) else f'{value:g}'}")
    return 0


def _schedule(args: argparse.Namespace) -> Schedule:
    """Returns the schedule that the arguments name, checked."""
    counts = {name: getattr(args, name) for name in _COUNTS if getattr(args, name) is not None}
    if args.name not in FAMILIES and (args.name.endswith(".csv") or is_file(args.name)):
        if counts:
            names = ", ".join(f"--{name}" for name in counts)
            raise ValueError(f"{args.name} is a file and has its counts. Leave out {names}.")
        return schedules.read_csv(args.name)
    get_family(args.name)  # a wrong name is reported before a missing count
    for name in ("ranks", "microbatches"):
        if name not in counts:
            raise ValueError(f"`--{name}` is missing. Give the number of {name}.")
    try:
        return schedules.check(schedules.build(args.name, **counts))
    except ValueError as error:
        ours = {f"`{name}`": f"`--{name}`" for name in _COUNTS}
        raise ValueError(_renamed(str(error), ours)) from None


def _timeline(args: argparse.Namespace) -> Timeline:
    costs = parse_costs(args.costs, args.transfer)
    schedule = _schedule(args)
    try:
        if args.lock_step:
            return simulate_ticks(to_lock_step(schedule, costs), costs)
        return schedules.simulate(schedule, costs)
    except ValueError as error:
        raise _with_options(error) from None


def _with_options(error: ValueError) -> ValueError:
    """Returns an error about costs that names the options of the command line."""
    letters = {"forward": "F", "input": "I", "weight": "W"}
    names = {f"`{name}`": f"{letter} of `--costs`" for name, letter in letters.items()}
    return ValueError(_renamed(str(error), {**names, "`transfer`": "`--transfer`"}))


def _renamed(message: str, names: Mapping[str, str]) -> str:
    for name, ours in names.items():
        message = message.replace(name, ours)
    return message


def parse_costs(costs: str, transfer: str) -> Costs:
    """Parses the costs `F,I,W` of actions, each a number, or numbers per stage between `/`.

    Example:
        >>> parse_costs("10,12,8/9", "0.5").weight
        (8, 9)
    """
    parts = costs.split(",")
    if len(parts) != 3:
        raise ValueError(
            f"`--costs` is {short_repr(costs)}. Give three costs F,I,W, such as 10,12,8."
        )
    forward, inputs, weight = (
        _parse_number("costs", part)
        if "/" not in part
        else tuple(_parse_number("costs", cost) for cost in part.split("/"))
        for part in parts
    )
    return Costs(forward, inputs, weight, transfer=_parse_number("transfer", transfer))


def _parse_number(argument: str, written: str) -> int | float:
    """Parses a number. An integer stays one, so that times are exact."""
    try:
        return float(written) if not written.strip().isdecimal() else int(written)
    except ValueError:
        raise ValueError(
            f"`--{argument}` has {short_repr(written)}, which is no number. Give one."
        ) from None


def _figures(timeline: Timeline) -> dict[str, object]:
    schedule = timeline.schedule
    return {
        "ranks": num_ranks(schedule),
        "stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        "slices": num_slices(schedule),
        "makespan": schedules.makespan(timeline),
        "bubble": rectangular_bubble(timeline),
        "parallelogram_bubble": parallelogram_bubble(timeline),
        "busy": busy_times(timeline),
        "peak_activations": schedules.peak_activations(schedule),
    }


def _figures_text(timeline: Timeline) -> str:
    figures = _figures(timeline)
    width = max(map(len, figures))
    return "\n".join(
        f"{name.replace('_', ' ').ljust(width)}  "
        + (" ".join(f"{v:g}" for v in value) if isinstance(value, tuple) else f"{value:g}")
        for name, value in figures.items()
    )
