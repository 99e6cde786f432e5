"""Seconds of collectives, over links inside a domain and over the network between domains."""

from dataclasses import dataclass
from math import ceil, log, log2

from ...devices import Hardware
from ._efficiency import Efficiency
from ._layout import Layout

_TORUS_SIDE = 16


@dataclass(frozen=True)
class Device:
    """A kind of device in a layout, and what programs reach of it, its links and its network."""

    hardware: Hardware
    reached: Efficiency
    domain: int  # devices that links join

    @property
    def memory_rate(self) -> float:
        """Bytes a second of elementwise operations."""
        return self.hardware.memory_bandwidth * self.reached.memory

    @property
    def link_rate(self) -> float:
        """Bytes a second over links."""
        return self.hardware.link_bandwidth * self.reached.links

    @property
    def network_rate(self) -> float:
        """Bytes a second over the network."""
        return self.hardware.network_bandwidth * self.reached.network


@dataclass(frozen=True)
class Group:
    """Devices that communicate: how many, and how many of them links join."""

    size: int
    linked: int


def make_device(layout: Layout, hardware: Hardware, reached: Efficiency) -> Device:
    """Returns a device of a layout."""
    domain = min(hardware.link_domain, layout.devices)
    if layout.hosts:
        domain = max(1, min(domain, layout.devices // layout.hosts))
    return Device(hardware, reached, domain)


def make_group(layout: Layout, device: Device, *axes: str) -> Group:
    """Returns the devices along mesh axes."""
    size = linked = 1
    for axis in axes:
        along = layout.size(axis)
        size *= along
        linked *= max(1, min(along, device.domain // layout.stride(axis)))
    return Group(size, linked)


def all_gather_seconds(
    total_bytes: float, group: Group, device: Device, *, in_one_ring: bool = False
) -> float:
    """Returns the seconds of an all-gather to, or a reduce-scatter of, `total_bytes`."""
    if group.size == 1:
        return 0.0
    axes = 1 if in_one_ring else _axes(group, device)
    inside = total_bytes * (group.linked - 1) / group.linked / _ring_rate(group, device, axes)
    outside = total_bytes * (1 - group.linked / group.size) / (group.linked * device.network_rate)
    return max(inside, outside) + _latency(group, device)


def all_to_all_seconds(
    sent_bytes: float, group: Group, device: Device, outside_share: float = 1.0
) -> float:
    """Returns the seconds of an all-to-all.

    `outside_share` is the part of what leaves a domain that is sent: less than 1 where what goes to
    several of its devices is sent once.
    """
    if group.size == 1:
        return 0.0
    share = (group.linked - 1) / group.size
    if device.hardware.torus_axes:  # a message crosses a quarter of each ring on its way
        side = group.linked ** (1 / _axes(group, device))
        share = max(share, side / 4)
    inside = sent_bytes * share / _ring_rate(group, device, _axes(group, device))
    outside = outside_share * sent_bytes * (1 - group.linked / group.size) / device.network_rate
    return max(inside, outside) + _latency(group, device)


def send_seconds(sent_bytes: float, layout: Layout, device: Device) -> float:
    """Returns the seconds to the next rank, over the network if any hand-over crosses it."""
    if layout.stage == 1:
        return 0.0
    if layout.stride("stage") * layout.stage <= device.domain:
        rate = device.link_rate / 2 if device.hardware.torus_axes else device.link_rate
        return sent_bytes / rate + device.hardware.link_latency
    return sent_bytes / device.network_rate + device.hardware.network_latency


def _axes(group: Group, device: Device) -> int:
    """Returns the axes of a torus that a group of devices spans, of 16 devices at most each."""
    return min(device.hardware.torus_axes, max(1, ceil(log(group.linked, _TORUS_SIDE))))


def _ring_rate(group: Group, device: Device, axes: int) -> float:
    if not device.hardware.torus_axes:
        return device.link_rate
    rate = device.link_rate * axes
    return rate / 2 if group.linked == 2 else rate  # two neighbours have one link


def _latency(group: Group, device: Device) -> float:
    inside = log2(group.linked) * device.hardware.link_latency
    outside = log2(group.size / group.linked) * device.hardware.network_latency
    return inside + max(0.0, outside)
