"""The speed of a step beside the peak of its devices, and the memory that they report."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ... import models
from ...devices import find_peak_tflops
from ..plan._devices import BatchPlan
from ..plan._weight_plan import WeightPlan


def peak_tflops(device: Any, given: float) -> float | None:
    """Returns `given` or else the published peak of a device in 1e12 FLOPs a second, if known."""
    return given or find_peak_tflops(device.device_kind)


@dataclass(frozen=True)
class StepWork:
    """What a step computes, and the devices that it keeps busy.

    Attributes:
        flops: Floating-point operations of the model, over all devices: those of matrix products,
            forward and backward, without recomputed ones.
        num_tokens: Tokens, summed over all devices.
        num_devices: The number of devices.
        peak_tflops: The peak of one device, in 1e12 operations a second; None if it is not known.
    """

    flops: float
    num_tokens: int
    num_devices: int
    peak_tflops: float | None


def step_work(weights: WeightPlan, batch: BatchPlan, given_tflops: float = 0.0) -> StepWork:
    """Counts what a step computes."""
    mesh = batch.devices.mesh
    tree = weights.abstract_unstacked
    per_token = models.matmul_flops_per_token(weights.sizes, tree, batch.length)
    peak = peak_tflops(mesh.devices.flat[0], given_tflops)
    return StepWork(batch.num_tokens * per_token, batch.num_tokens, mesh.size, peak)


def speed_metrics(work: StepWork, seconds: float) -> dict[str, float]:
    """Returns a step's seconds, tokens per second, model FLOPs per second and device, and MFU.

    Recomputed operations are not counted. `mfu` is there if the peak of the device is known.
    """
    tflops = work.flops / seconds / work.num_devices / 1e12
    metrics = {
        "step_time_seconds": seconds,
        "tokens_per_second": work.num_tokens / seconds,
        "tflops_per_second_per_device": tflops,
    }
    return metrics | ({"mfu": tflops / work.peak_tflops} if work.peak_tflops else {})


def memory_metrics(devices: Iterable[Any]) -> dict[str, float]:
    """Returns the most memory that any of some devices has had in use, as a metric.

    `peak_memory_gb` is in 1e9 bytes, since the process began; CPUs do not report it.

    Example:
        >>> import jax
        >>> memory_metrics(jax.devices("cpu"))
        {}
    """
    reported = [device.memory_stats() or {} for device in devices]
    peaks = [stats["peak_bytes_in_use"] for stats in reported if "peak_bytes_in_use" in stats]
    return {"peak_memory_gb": max(peaks) / 1e9} if peaks else {}
