"""Seconds of collectives, over links inside a domain and over the network between domains."""

from dataclasses import dataclass
from math import ceil, log, log2

from ...devices import Hardware
from ._efficiency import Efficiency
from ._layout import Layout

_TORUS_SIDE = 16


@dataclass(frozen=True)
class Network:
    """The links and the network as programs reach them."""

    link: float  # bytes a second of a device over links
    network: float  # bytes a second of a device over the network
    link_latency: float  # seconds of a message over links
    network_latency: float  # seconds of a message over the network
    torus_axes: int  # axes of the torus that links make; 0 where links join all with all
    domain: int  # devices that links join


@dataclass(frozen=True)
class Group:
    """Devices that communicate: how many, and how many of them links join."""

    size: int
    linked: int


def make_network(layout: Layout, hardware: Hardware, reached: Efficiency) -> Network:
    """Returns the network of a layout."""
    domain = min(hardware.link_domain, layout.devices)
    if layout.hosts:
        domain = max(1, min(domain, layout.devices // layout.hosts))
    return Network(
        link=hardware.link_bandwidth * reached.links,
        network=hardware.network_bandwidth * reached.network,
        link_latency=hardware.link_latency,
        network_latency=hardware.network_latency,
        torus_axes=hardware.torus_axes,
        domain=domain,
    )


def make_group(layout: Layout, network: Network, *axes: str) -> Group:
    """Returns the devices along mesh axes."""
    size = linked = 1
    for axis in axes:
        along = layout.size(axis)
        size *= along
        linked *= max(1, min(along, network.domain // layout.stride(axis)))
    return Group(size, linked)


def all_gather_seconds(
    total_bytes: float, group: Group, network: Network, *, in_one_ring: bool = False
) -> float:
    """Returns the seconds of an all-gather to, or a reduce-scatter of, `total_bytes`."""
    if group.size == 1:
        return 0.0
    axes = 1 if in_one_ring else _axes(group, network)
    inside = total_bytes * (group.linked - 1) / group.linked / _ring_rate(group, network, axes)
    outside = total_bytes * (1 - group.linked / group.size) / (group.linked * network.network)
    return max(inside, outside) + _latency(group, network)


def all_to_all_seconds(
    sent_bytes: float, group: Group, network: Network, outside_share: float = 1.0
) -> float:
    """Returns the seconds of an all-to-all.

    `outside_share` is the part of what leaves a domain that is sent: less than 1 where what goes to
    several of its devices is sent once.
    """
    if group.size == 1:
        return 0.0
    share = (group.linked - 1) / group.size
    if network.torus_axes:  # a message crosses a quarter of each ring on its way
        side = group.linked ** (1 / _axes(group, network))
        share = max(share, side / 4)
    inside = sent_bytes * share / _ring_rate(group, network, _axes(group, network))
    outside = outside_share * sent_bytes * (1 - group.linked / group.size) / network.network
    return max(inside, outside) + _latency(group, network)


def send_seconds(sent_bytes: float, layout: Layout, network: Network) -> float:
    """Returns the seconds to the next rank, over the network if any hand-over crosses it."""
    if layout.stage == 1:
        return 0.0
    if layout.stride("stage") * layout.stage <= network.domain:
        rate = network.link / 2 if network.torus_axes else network.link
        return sent_bytes / rate + network.link_latency
    return sent_bytes / network.network + network.network_latency


def _axes(group: Group, network: Network) -> int:
    """Returns the axes of a torus that a group of devices spans, of 16 devices at most each."""
    return min(network.torus_axes, max(1, ceil(log(group.linked, _TORUS_SIDE))))


def _ring_rate(group: Group, network: Network, axes: int) -> float:
    if not network.torus_axes:
        return network.link
    rate = network.link * axes
    return rate / 2 if group.linked == 2 else rate  # two neighbours have one link


def _latency(group: Group, network: Network) -> float:
    inside = log2(group.linked) * network.link_latency
    outside = log2(group.size / group.linked) * network.network_latency
    return inside + max(0.0, outside)
