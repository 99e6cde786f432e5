"""Prints the estimated time of a step."""

from collections.abc import Iterator
from math import isnan
from typing import Any

from ..step_time import KERNEL_EFFICIENCY, InstructionCost, StepTime, device_rates
from ._columns import align, shorten


def step_rates(
    time: StepTime, platform: str, num_devices: int, model_flops: float, tokens: int
) -> dict[str, float]:
    """Returns tokens per second, TFLOP/s of the model per device, and MFU, as far as known."""
    figures = {}
    if tokens:
        figures["tokens_per_second"] = tokens / time.seconds
    if not isnan(model_flops):
        tflops = model_flops / num_devices / time.seconds / 1e12
        figures["tflops_per_device"] = tflops
        if rates := device_rates(platform):
            figures["mfu"] = tflops / rates.peak_tflops
    return figures


def time_rows(time: StepTime, rates: dict[str, float]) -> list[str]:
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
    return [*align(rows), *(["; ".join(speed)] if speed else []), *_remarks(time)]


_RATES = {
    "tokens_per_second": "{:,.0f} tokens a second over all devices",
    "tflops_per_device": "{:.1f} TFLOP/s of the model per device",
    "mfu": "MFU {:.1%}",
}


def _remarks(time: StepTime) -> Iterator[str]:
    if time.busy_seconds.get("kernels"):
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


def dearest_rows(time: StepTime, count: int) -> list[str]:
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


def time_json(time: StepTime, rates: dict[str, float], num_dearest: int) -> dict[str, Any]:
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
