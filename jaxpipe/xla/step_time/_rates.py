"""What TPUs do in a second: clocks, matrix products and links, by generation."""

from dataclasses import dataclass

from .._device_peaks import PEAK_TFLOPS
from ..hlo._groups import device_groups


@dataclass(frozen=True)
class DeviceRates:
    """What one device of JAX does in a second.

    Attributes:
        clock_ghz: 1e9 cycles a second of a TensorCore: the peak divided by two operations for every
            multiplier of its matrix units.
        peak_tflops: 1e12 operations a second of dense matrix products in bfloat16.
        link_gb: GB a second of one link to a neighbour, in one direction.
        network_gb: GB a second to another slice, in one direction.
    """

    clock_ghz: float
    peak_tflops: float
    link_gb: float
    network_gb: float


_RATES = {
    # Clock, link and network. Bidirectional bandwidth of a chip's links (v4, v5p and tpu7x have 6
    # links, v5e and v6e 4) and of the data centre's network: docs.cloud.google.com/tpu/docs/v4,
    # v5e, v5p, v6e, tpu7x. Where that page has no figure of the network, a v5e has half of a v5p's,
    # the others have it.
    "TPU v4": (1.05, 50.0, 6.25),
    "TPU v5 lite": (1.5, 50.0, 3.125),
    "TPU v5e": (1.5, 50.0, 3.125),
    "TPU v5": (1.75, 100.0, 6.25),
    "TPU v5p": (1.75, 100.0, 6.25),
    "TPU v6 lite": (1.75, 100.0, 6.25),
    "TPU v6e": (1.75, 100.0, 6.25),
    # A chip is two devices, which share its links.
    "TPU7x": (2.2, 50.0, 6.25),
}


def device_rates(device_kind: str) -> DeviceRates | None:
    """Returns the rates of a kind of device by its name in JAX, or None if it is not a TPU.

    Args:
        device_kind: The `device_kind` of a device, such as "TPU v5".

    Returns:
        Its rates.

    Example:
        >>> device_rates("TPU v5").clock_ghz
        1.75
    """
    if device_kind not in _RATES:
        return None
    clock_ghz, link_gb, network_gb = _RATES[device_kind]
    return DeviceRates(clock_ghz, PEAK_TFLOPS[device_kind], link_gb, network_gb)


def transfer_seconds(
    kind: str, result_bytes: int, groups: str, rates: DeviceRates, *, across_slices: bool
) -> float:
    """Returns the seconds that one execution of a collective takes if nothing else uses the links.

    A group of n devices is a ring: a device sends to both neighbours at once, through one link
    each; two devices have one link. Between slices the network counts instead.

    Args:
        kind: The kind of collective, such as `all-gather`.
        result_bytes: Bytes of its result on one device.
        groups: The devices that communicate, as XLA writes them.
        rates: The rates of the devices.
        across_slices: Whether it crosses the network between slices.

    Returns:
        Seconds.
    """
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
