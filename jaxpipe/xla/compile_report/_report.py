"""Prints a compiled step as a table and as JSON. MB is 1e6, GB 1e9 bytes."""

import dataclasses
import importlib.metadata
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import isnan, nan
from typing import Any

import jax
from jax.sharding import Mesh

from ...devices import find_hardware
from ..hlo import (
    Audit,
    CollectiveSite,
    CollectiveTotals,
    add_up,
    audit,
    gpu_hosts,
    totals,
    uncounted_loops,
)
from ..step_time import KERNEL_EFFICIENCY, InstructionCost, StepTime, device_rates, estimated_time
from ._memory import Memory, memory

_RATES = {
    "tokens_per_second": "{:,.0f} tokens a second over all devices",
    "tflops_per_device": "{:.1f} TFLOP/s of the model per device",
    "mfu": "MFU {:.1%}",
}


@dataclass(frozen=True)
class CompileReport:
    """A compiled step."""

    platform: str  # the kind of devices it is compiled for, such as `TPU v5`
    num_devices: int
    memory: Memory
    audit: Audit
    # Floating-point operations of the model per step, over all devices; NaN if they are unknown.
    model_flops: float
    compile_seconds: float  # seconds for lowering and compiling
    jax_version: str  # the version of JAX that lowered it
    libtpu_version: str  # the version of libtpu that compiled it; "" for another backend
    # The estimated time of a step; None on CPUs.
    step_time: StepTime | None = None
    tokens: int = 0  # tokens of a step, over all devices; 0 if they are unknown

    @property
    def fits(self) -> bool | None:
        """True if the peak is within the memory of a device; None if that is not known."""
        capacity = _capacity(self.platform)
        return None if capacity is None else self.memory.peak_bytes <= capacity

    def hidden_bytes(self) -> dict[str, float]:
        """Returns the bytes of results that move while the device computes, by kind."""
        # They are the share of the transfers' time in which the core does not wait.
        # Without an estimate of time a collective counts whole if a matrix product runs between its
        # start and its end.
        if self.step_time is None:
            return {kind: float(x.beside_product_bytes) for kind, x in totals(self.audit).items()}
        return {
            kind: x.result_bytes * self.step_time.hidden_share(kind)
            for kind, x in totals(self.audit).items()
        }

    def __str__(self) -> str:
        return report_text(self)


def _capacity(platform: str) -> int | None:
    """Returns the bytes of memory of a device of `platform`, or None if they are not known."""
    row = find_hardware(platform)
    return None if row is None else row.memory_bytes


def report_compiled(
    compiled: Any,
    hlo_text: str,
    mesh: Mesh,
    seconds: float,
    bubble: float,
    *,
    model_flops: float = nan,
    tokens: int = 0,
) -> CompileReport:
    """Makes the report of a compiled step; `bubble` is the share of its time that devices wait."""
    device, hosts = mesh.devices.flat[0], gpu_hosts(mesh.devices.flat)
    return CompileReport(
        platform=device.device_kind,
        num_devices=mesh.size,
        memory=memory(compiled, device.platform),
        audit=audit(hlo_text, hosts),
        model_flops=model_flops,
        compile_seconds=seconds,
        step_time=estimated_time(hlo_text, device.device_kind, bubble, hosts),
        tokens=tokens,
        jax_version=jax.__version__,
        libtpu_version=importlib.metadata.version("libtpu") if device.platform == "tpu" else "",
    )


def report_json(report: CompileReport, *, num_dearest: int = 0) -> str:
    """Returns a report as one JSON object, with the `num_dearest` instructions that take most."""
    values: dict[str, Any] = dataclasses.asdict(dataclasses.replace(report, step_time=None))
    values["device_bytes"] = _capacity(report.platform)
    if report.step_time is not None:
        values["step_time"] = _time_json(report.step_time, _rates(report), num_dearest)
    totals_by_kind = totals(report.audit).items()
    values["totals"] = {kind: dataclasses.asdict(total) for kind, total in totals_by_kind}
    values["uncounted_loops"] = uncounted_loops(report.audit)
    return json.dumps(values, indent=2)


def report_text(report: CompileReport, *, num_rows: int = 12, num_dearest: int = 0) -> str:
    """Returns a report as tables of memory, time, the `num_rows` largest collectives, and loops."""
    times = []
    if report.step_time is not None:
        row = find_hardware(report.platform)
        is_gpu = row is not None and row.is_gpu
        times = [_time_rows(report.step_time, _rates(report), is_gpu=is_gpu)]
        times += [_dearest_rows(report.step_time, num_dearest)] if num_dearest else []
    parts = (_heading(report), _memory(report), *times, _totals(report))
    lines = [*(line for part in parts for line in (*part, "")), *_sites(report.audit, num_rows)]
    return "\n".join([*lines, "", *_loops(report.audit)])


def _rates(report: CompileReport) -> dict[str, float]:
    """Returns tokens per second, TFLOP/s of the model per device, and MFU, as far as known."""
    assert report.step_time is not None
    figures, seconds = {}, report.step_time.seconds
    if report.tokens:
        figures["tokens_per_second"] = report.tokens / seconds
    if not isnan(report.model_flops):
        tflops = report.model_flops / report.num_devices / seconds / 1e12
        figures["tflops_per_device"] = tflops
        if rates := device_rates(report.platform):
            figures["mfu"] = tflops / rates.peak_tflops
    return figures


def _heading(report: CompileReport) -> Iterator[str]:
    compiler = f", libtpu {report.libtpu_version}" if report.libtpu_version else ""
    yield f"{report.num_devices} x {report.platform}, jax {report.jax_version}{compiler}"
    flops = "" if isnan(report.model_flops) else f"; {report.model_flops:.4g} model FLOPs a step"
    yield f"compiled in {report.compile_seconds:.1f} s{flops}"


def _memory(report: CompileReport) -> Iterator[str]:
    yield "memory per device      MB"
    for name, size in dataclasses.asdict(report.memory).items():
        if name == "host_bytes" and not size:
            continue
        yield f"  {name.removesuffix('_bytes'):<10} {size / 1e6:>12,.1f}"
    capacity = _capacity(report.platform)
    if capacity:
        share = report.memory.peak_bytes / capacity
        yield f"  {'capacity':<10} {capacity / 1e6:>12,.1f}; the peak is {share:.0%} of it"


def _totals(report: CompileReport) -> list[str]:
    hidden = report.hidden_bytes()
    rows = [("collectives", "sites", "per step", "GB", "async", "hidden", "in loops", "dcn")]
    rows += [(kind, *_figures(total, hidden[kind])) for kind, total in totals(report.audit).items()]
    rows += [("all", *_figures(add_up(report.audit.sites), sum(hidden.values(), 0.0)))]
    return [*align(rows), *_warnings(report.audit)]


def _figures(total: CollectiveTotals, hidden: float) -> tuple[str, ...]:
    inside, across = total.in_loops_bytes, total.across_slices_bytes
    sizes = (total.result_bytes, total.asynchronous_bytes, hidden, inside, across)
    return (str(total.sites), str(total.executions), *(f"{size / 1e9:.3f}" for size in sizes))


def _warnings(audit: Audit) -> Iterator[str]:
    for name in uncounted_loops(audit):
        yield f"AT LEAST: the trip count of {name} is unknown; what is in it is counted once."


def _sites(audit: Audit, num_rows: int) -> list[str]:
    """Returns rows of the collectives that move most; those equal but for their name share one."""
    groups: dict[tuple[str, ...], list[CollectiveSite]] = {}
    for site in audit.sites:
        groups.setdefault(_traits(site), []).append(site)
    largest = [(add_up(tuple(sites)), traits) for traits, sites in groups.items()]
    largest.sort(key=lambda item: -item[0].result_bytes)
    rows: list[tuple[str, ...]] = [
        ("largest", "sites", "per step", "GB", "async", "loops", "branch", "shape", "from")
    ]
    for moved, (kind, *others) in largest[:num_rows]:
        rows.append((kind, *_figures(moved, 0.0)[:3], *others))
    return align(rows, left=(0, 7, 8))


def _traits(site: CollectiveSite) -> tuple[str, ...]:
    return (
        site.kind,
        "yes" if site.asynchronous else "no",
        str(len(site.loops)),
        "yes" if site.conditional else "no",
        shorten(site.shape, 40),
        shorten(site.op_name, -60),
    )


def _loops(audit: Audit) -> list[str]:
    rows = [(f"{len(audit.loops)} loop(s)", "trips", "inside", "from")]
    for loop in audit.loops:
        trips = "unknown" if loop.trips is None else str(loop.trips)
        rows.append((loop.name, trips, " ".join(loop.loops), shorten(loop.op_name, -60)))
    return align(rows, left=(0, 2, 3))


def _time_rows(time: StepTime, rates: dict[str, float], *, is_gpu: bool) -> list[str]:
    """Returns the lines of a step's time by kind of work, what it amounts to, and what it lacks."""
    rows = [("time per step, estimated", "s", "share")]
    parts = {f"  {work}": seconds for work, seconds in time.busy_seconds.items()}
    parts["  bubbles"] = time.bubble_seconds
    parts |= {f"  exposed {kind}": seconds for kind, seconds in time.exposed_seconds.items()}
    rows += [
        (name, f"{seconds:.4f}", f"{seconds / time.seconds:.1%}")
        for name, seconds in parts.items()
        if seconds
    ]
    rows.append(("  all", f"{time.seconds:.4f}", ""))
    speed = [_RATES[name].format(rate) for name, rate in rates.items()]
    return [*align(rows), *(["; ".join(speed)] if speed else []), *_remarks(time, is_gpu=is_gpu)]


def _remarks(time: StepTime, *, is_gpu: bool) -> Iterator[str]:
    if is_gpu:
        yield (
            "By a roofline: products at 80% of the peak, bytes at 90% of the bandwidth, cuDNN's "
            "attention as on an H200."
        )
    elif time.busy_seconds.get("kernels"):
        yield f"Kernels are counted by their FLOPs at {KERNEL_EFFICIENCY:.0%} of the peak."
    if time.unmarked_seconds:
        yield (
            f"{time.unmarked_seconds:.4f} s are in branches that count as always taken: the "
            "program does not say how often they are."
        )
    if time.no_estimate:
        counts = ", ".join(f"{name} x {count:.0f}" for name, count in time.no_estimate.items())
        yield f"Without an estimate: {counts}."
    yield (
        "Left out: copies that run beside other work, also to the host, and input. All links of a "
        "device are one queue."
    )


def _dearest_rows(time: StepTime, count: int) -> list[str]:
    """Returns a line for each of the instructions that take most of a step."""
    rows = [("dearest", "s", "sites", "per step", "branch", "shape", "line", "from")]
    for cost, sites in time.dearest(count):
        rows.append(
            (
                f"{cost.work}: {cost.opcode}",
                f"{cost.total:.4f}",
                str(sites),
                f"{cost.executions:.0f}",
                _branch(cost),
                shorten(cost.shape, 40),
                cost.source,
                shorten(cost.op_name, -50),
            )
        )
    return align(rows, left=(0, 5, 6, 7))


def _branch(cost: InstructionCost) -> str:
    if cost.marked:
        return "marked"
    return "unmarked" if cost.unmarked else "no"


def _time_json(time: StepTime, rates: dict[str, float], num_dearest: int) -> dict[str, Any]:
    """Returns the estimated time of a step for JSON."""
    names = (
        *("busy_seconds", "exposed_seconds", "transfer_seconds", "bubble_seconds"),
        *("unmarked_seconds", "seconds", "no_estimate"),
    )
    return {
        **{name: getattr(time, name) for name in names},
        **rates,
        "dearest": [
            vars(cost) | {"total": cost.total, "sites": sites}
            for cost, sites in time.dearest(num_dearest)
        ],
    }


def shorten(text: str, width: int) -> str:
    """Returns at most `width` characters: the first, or if `width` is negative the last."""
    if len(text) <= abs(width):
        return text
    return text[: width - 3] + "..." if width > 0 else "..." + text[width + 3 :]


def align(rows: list[tuple[str, ...]], left: Collection[int] = (0,)) -> list[str]:
    """Returns rows of text in columns.

    Args:
        rows: The cells of each row.
        left: The columns whose cells are on the left; those of the others are on the right.

    Returns:
        The lines, with two spaces between columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
