"""What is known about a program before it runs, as a table and as JSON. MB is 1e6, GB 1e9 bytes."""

import dataclasses
import importlib.metadata
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from ._audit import Audit, Site, Total, total, totals, uncounted_loops
from ._memory import Memory


@dataclass(frozen=True)
class Report:
    """One compiled step.

    Attributes:
        platform: The devices it is compiled for, such as `TPU v5`.
        num_devices: How many of them.
        memory: Per device.
        audit: What a step communicates.
        model_flops: Floating-point operations of the model per step, over all devices.
        compile_seconds: Lowering and compiling.
        jax_version: The version that lowered it.
        libtpu_version: The version that compiled it, or "" if another backend did.
    """

    platform: str
    num_devices: int
    memory: Memory
    audit: Audit
    model_flops: float
    compile_seconds: float
    jax_version: str
    libtpu_version: str


def versions(platform: str) -> dict[str, str]:
    """`jax_version` and `libtpu_version` of a report about devices of `platform`."""
    libtpu = importlib.metadata.version("libtpu") if platform == "tpu" else ""
    return {"jax_version": jax.__version__, "libtpu_version": libtpu}


def report_json(report: Report) -> str:
    """One JSON object: the report, with a total for each kind of collective."""
    values: dict[str, Any] = dataclasses.asdict(report)
    of_kind = totals(report.audit).items()
    values["totals"] = {kind: dataclasses.asdict(sums) for kind, sums in of_kind}
    values["uncounted_loops"] = uncounted_loops(report.audit)
    return json.dumps(values, indent=2)


def report_text(report: Report, *, num_rows: int = 12) -> str:
    """Tables of memory, collectives, the `num_rows` that move most, and loops."""
    parts = (_heading(report), _memory(report.memory), _totals(report.audit))
    lines = [*(line for part in parts for line in (*part, "")), *_sites(report.audit, num_rows)]
    return "\n".join([*lines, "", *_loops(report.audit)])


def _heading(report: Report) -> Iterator[str]:
    compiler = f", libtpu {report.libtpu_version}" if report.libtpu_version else ""
    yield f"{report.num_devices} x {report.platform}, jax {report.jax_version}{compiler}"
    yield f"compiled in {report.compile_seconds:.1f} s; {report.model_flops:.4g} model FLOPs a step"


def _memory(memory: Memory) -> Iterator[str]:
    yield "memory per device      MB"
    for name, size in dataclasses.asdict(memory).items():
        yield f"  {name.removesuffix('_bytes'):<10} {size / 1e6:>12,.1f}"


def _totals(audit: Audit) -> list[str]:
    rows = [("collectives", "sites", "per step", "GB", "async GB", "in loops GB", "dcn GB")]
    rows += [(kind, *_numbers(sums)) for kind, sums in totals(audit).items()]
    rows += [("all", *_numbers(total(audit.sites)))]
    return [*_table(rows), *_warnings(audit)]


def _numbers(sums: Total) -> tuple[str, ...]:
    inside, across = sums.in_loops_bytes, sums.across_slices_bytes
    sizes = (sums.result_bytes, sums.asynchronous_bytes, inside, across)
    return (str(sums.sites), str(sums.executions), *(f"{size / 1e9:.3f}" for size in sizes))


def _warnings(audit: Audit) -> Iterator[str]:
    for name in uncounted_loops(audit):
        yield f"AT LEAST: the trip count of {name} is unknown; what is in it is counted once."


def _sites(audit: Audit, num_rows: int) -> list[str]:
    """What moves most; sites that differ in nothing but their name share a row."""
    groups: dict[tuple[str, ...], list[Site]] = {}
    for site in audit.sites:
        groups.setdefault(_traits(site), []).append(site)
    sums = [(total(tuple(sites)), traits) for traits, sites in groups.items()]
    sums.sort(key=lambda item: -item[0].result_bytes)
    rows: list[tuple[str, ...]] = [
        ("largest", "sites", "per step", "GB", "async", "loops", "branch", "shape", "from")
    ]
    for moved, (kind, *others) in sums[:num_rows]:
        rows.append((kind, *_numbers(moved)[:3], *others))
    return _table(rows, left=(0, 7, 8))


def _traits(site: Site) -> tuple[str, ...]:
    return (
        site.kind,
        "yes" if site.asynchronous else "no",
        str(len(site.loops)),
        "yes" if site.conditional else "no",
        _short(site.shape, 40),
        _short(site.op_name, -60),
    )


def _loops(audit: Audit) -> list[str]:
    rows = [(f"{len(audit.loops)} loop(s)", "trips", "inside", "from")]
    for loop in audit.loops:
        trips = "unknown" if loop.trips is None else str(loop.trips)
        rows.append((loop.name, trips, " ".join(loop.loops), _short(loop.op_name, -60)))
    return _table(rows, left=(0, 2, 3))


def _short(text: str, width: int) -> str:
    """At most `width` characters: the first, or if `width` is negative the last."""
    if len(text) <= abs(width):
        return text
    return text[: width - 3] + "..." if width > 0 else "..." + text[width + 3 :]


def _table(rows: list[tuple[str, ...]], left: Collection[int] = (0,)) -> list[str]:
    """Aligned columns: those of `left` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
