"""Compares the speed of a run with the peak of its devices.

The peak is that of dense matrix products in bfloat16 that accumulate in float32.
"""

from typing import Any

from ... import models
from ..plan._setup import Setup

_TFLOPS = {
    # docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e and tpu7x: 2307 a chip, which is two devices.
    "TPU v4": 275.0,
    "TPU v5 lite": 197.0,
    "TPU v5e": 197.0,
    "TPU v5": 459.0,
    "TPU v5p": 459.0,
    "TPU v6 lite": 918.0,
    "TPU v6e": 918.0,
    "TPU7x": 1153.5,
    # NVIDIA's data sheets of A100, H100, H200 and HGX B200, without sparsity.
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H200": 989.0,
    "NVIDIA B200": 2250.0,
}
"""The peak of a device by the `device_kind` of JAX, in 1e12 floating-point operations a second."""


def peak_tflops(device: Any, given: float) -> float | None:
    """Returns the peak of a device, in 1e12 floating-point operations a second.

    Args:
        device: A device of JAX.
        given: The peak that the config gives; 0 if it gives none.

    Returns:
        `given` if it is not 0; else the published peak, or None if the device is not in the table.
    """
    return given or _TFLOPS.get(device.device_kind)


def model_flops(setup: Setup) -> float:
    """Returns the floating-point operations of the model in a step, over all devices.

    Args:
        setup: The run.

    Returns:
        The operations of matrix products, forward and backward, without recomputed ones.
    """
    length = setup.config.max_target_length
    return models.matmul_flops_per_token(setup.model_config, length) * setup.batch_size * length


def speed_metrics(setup: Setup, seconds: float) -> dict[str, float]:
    """Returns the metrics of the speed of a step.

    Recomputed operations are not counted: FLOPs are those of the model, not of the program.

    Args:
        setup: The run.
        seconds: The time that the step took.

    Returns:
        The step time in seconds, tokens per second, and model FLOPs per second and device (1e12);
        and `mfu`, their fraction of the peak of the device, if that is known.
    """
    tokens = setup.batch_size * setup.config.max_target_length
    tflops = model_flops(setup) / seconds / setup.mesh.size / 1e12
    found = {
        "step_time_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tflops_per_second_per_device": tflops,
    }
    peak = peak_tflops(setup.mesh.devices.flat[0], setup.config.peak_tflops_per_device)
    return found | ({"mfu": tflops / peak} if peak else {})
