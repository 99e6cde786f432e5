"""Measures the memory of devices, where their backend reports it."""

from collections.abc import Iterable
from typing import Any


def memory_metrics(devices: Iterable[Any]) -> dict[str, float]:
    """Returns the most memory that any of some devices has had in use, as a metric.

    Returns:
        `peak_memory_gb`, in 1e9 bytes, since the process began; an empty dictionary where the
        backend does not report it, as on CPU.

    Example:
        >>> import jax
        >>> memory_metrics(jax.devices("cpu"))
        {}
    """
    reported = [device.memory_stats() or {} for device in devices]
    peaks = [stats["peak_bytes_in_use"] for stats in reported if "peak_bytes_in_use" in stats]
    return {"peak_memory_gb": max(peaks) / 1e9} if peaks else {}
