"""What devices do in a second: clocks, matrix products, memory and links, by generation."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...devices import find_hardware
from ..hlo._collectives import Groups, device_groups


@dataclass(frozen=True)
class DeviceRates:
    """Holds the clock, the peak and the bandwidths of a device of TPUs."""

    # 1e9 cycles a second of a TensorCore: the peak divided by two operations for every multiplier
    # of its matrix units.
    clock_ghz: float
    peak_tflops: float  # 1e12 operations a second of dense matrix products in bfloat16
    link_gb: float  # GB a second of one link to a neighbour, in one direction
    network_gb: float  # GB a second to another slice, in one direction


@dataclass(frozen=True)
class GpuRates:
    """Holds the peak and the bandwidths of a GPU."""

    peak_tflops: float  # 1e12 operations a second of dense matrix products in bfloat16
    memory_gb: float  # GB a second that are read from its memory, or written
    link_gb: float  # GB a second of its links to the others of a host, in one direction
    network_gb: float  # GB a second of its network adapter, in one direction
    # The host of every device of the program, or what NVLink joins with it; empty: one.
    hosts: tuple[int, ...] = ()


Rates = DeviceRates | GpuRates


def device_rates(device_kind: str, hosts: Sequence[int] = ()) -> Rates | None:
    """Returns the rates of a kind of device by its name in JAX, or None if it is not known.

    Args:
        hosts: The host of every GPU of a program; empty for one host.

    Returns:
        `DeviceRates` of TPUs or `GpuRates` of GPUs; None if the kind is not known.

    Example:
        >>> device_rates("TPU v5").clock_ghz
        1.75
    """
    row = find_hardware(device_kind)
    if row is None:
        return None
    if row.is_gpu:
        link_gb, network_gb = row.link_bandwidth / 1e9, row.network_bandwidth / 1e9
        memory_gb = row.memory_bandwidth / 1e9
        joined = max(1, row.link_domain // row.devices_per_host)
        domains = tuple(host // joined for host in hosts)
        return GpuRates(row.peak_tflops, memory_gb, link_gb, network_gb, domains)
    link_gb = row.link_bandwidth / 2e9  # an axis of the torus is two links
    return DeviceRates(row.clock_ghz, row.peak_tflops, link_gb, row.network_bandwidth / 1e9)


def transfer_seconds(
    kind: str,
    result_bytes: int,
    groups: str,
    rates: Rates,
    *,
    across_slices: bool,
) -> float:
    """Returns the seconds of one execution of a collective if nothing else uses the links."""
    if isinstance(rates, GpuRates):
        return _between_gpus(kind, result_bytes, device_groups(groups), rates)
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


def _between_gpus(kind: str, result_bytes: int, groups: Groups, rates: GpuRates) -> float:
    """Returns the seconds of rings through all links of GPUs, or through adapters between hosts."""
    every = tuple(range(max(len(rates.hosts), 2)))
    seconds = (_of_group(kind, result_bytes, group or every, rates) for group in groups)
    return max(seconds, default=_of_group(kind, result_bytes, every, rates))


def _of_group(kind: str, result_bytes: int, group: tuple[int, ...], rates: GpuRates) -> float:
    n = len(group)
    num_hosts = len({rates.hosts[i] for i in group}) if rates.hosts else 1
    if kind in ("collective-permute", "collective-broadcast"):
        bandwidth = rates.network_gb if num_hosts > 1 else rates.link_gb
        return result_bytes / (1e9 * bandwidth)
    bandwidth = rates.link_gb
    if num_hosts > 1:
        bandwidth = min(bandwidth, rates.network_gb * n / num_hosts)
    volume = {"reduce-scatter": n - 1, "all-reduce": 2 * (n - 1) / n}.get(kind, (n - 1) / n)
    return volume * result_bytes / (1e9 * bandwidth)
