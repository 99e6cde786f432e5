"""What TPUs do in a second: clocks, matrix products and links, by generation."""

from dataclasses import dataclass

from ...devices import find_hardware
from ..hlo._groups import device_groups


@dataclass(frozen=True)
class DeviceRates:
    """What one device of JAX does in a second."""

    # 1e9 cycles a second of a TensorCore: the peak divided by two operations for every multiplier
    # of its matrix units.
    clock_ghz: float
    peak_tflops: float  # 1e12 operations a second of dense matrix products in bfloat16
    link_gb: float  # GB a second of one link to a neighbour, in one direction
    network_gb: float  # GB a second to another slice, in one direction


def device_rates(device_kind: str) -> DeviceRates | None:
    """Returns the rates of a kind of device by its name in JAX, or None if it is not a TPU.

    Example:
        >>> device_rates("TPU v5").clock_ghz
        1.75
    """
    row = find_hardware(device_kind)
    if row is None or row.is_gpu:
        return None
    link_gb = row.link_bandwidth / 2e9  # an axis of the torus is two links
    return DeviceRates(row.clock_ghz, row.peak_tflops, link_gb, row.network_bandwidth / 1e9)


def transfer_seconds(
    kind: str, result_bytes: int, groups: str, rates: DeviceRates, *, across_slices: bool
) -> float:
    """Returns the seconds of one execution of a collective if nothing else uses the links."""
    # A group of n devices is a ring: a device sends to both neighbours at once, through one link
    # each; two devices have one link. Between slices the network counts instead.
    bandwidth = 1e9 * (rates.network_gb if across_slices else rates.link_gb)
    if kind in ("collective-permute", "collective-broadcast"):
        return result_bytes / bandwidth
    n = max(map(len, device_groups(groups)), default=2)
    share = 1 / 2 if n == 2 else (n - 1) / (2 * n)
    volume = {
        "all-gather": share,
        "reduce-scatter": share * n,
        "all-reduce": 2 * share,
        "all-to-all": max(1 / 2, n / 8),
        "ragged-all-to-all": max(1 / 2, n / 8),
    }[kind]
    return volume * result_bytes / bandwidth
