"""Names of devices as people write them, and stand-ins for devices that are absent.

`v5p-64` counts TensorCores, as Google's names of accelerators do, `v5p:4x4x2` chips of a torus,
`h100:2x8` hosts and devices of each, and `here` are the devices of this process.
"""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import jax

from ..devices import HARDWARE, Hardware, find_hardware, generation_of, host_bytes

_USABLE = 0.95
"""The share of a device's memory that is planned with; the rest is for what is not foreseen."""


@dataclass(frozen=True)
class Devices:
    """The devices that a plan is for.

    Attributes:
        name: The name as it was given.
        generation: The generation, such as "v5p" or "h100".
        shape: Chips along each dim of a slice of TPUs; hosts and devices of each of GPUs.
        num_slices: The number of such slices; 1 for GPUs.
        memory_bytes: The memory of a device.
        is_gpu: Whether these are GPUs.
        are_here: Whether these are the devices of this process.
    """

    name: str
    generation: str
    shape: tuple[int, ...]
    num_slices: int
    memory_bytes: int
    is_gpu: bool
    are_here: bool = False

    @property
    def num_devices(self) -> int:
        """Returns the number of devices of all slices."""
        return self.num_slices * self.devices_per_slice

    @property
    def devices_per_slice(self) -> int:
        """Returns the number of devices of a slice."""
        chips = math.prod(self.shape)
        return chips if self.are_here else chips * HARDWARE[self.generation].devices_per_chip

    @property
    def devices_per_domain(self) -> int:
        """Returns the number of devices that fast links join: of a host or rack, or of a slice."""
        if not self.is_gpu:
            return self.devices_per_slice
        row = device_hardware(self)
        if row.link_domain == row.devices_per_host or self.shape[-1] > row.devices_per_host:
            return self.shape[-1]
        return min(row.link_domain, self.num_devices)

    @property
    def devices_per_host(self) -> int:
        """Returns the number of devices of a host."""
        per_host = device_hardware(self).devices_per_host
        return min(per_host, self.shape[-1]) if self.is_gpu else per_host

    @property
    def chips_per_host(self) -> int:
        """Returns the chips of a host with TPUs, or the GPUs of one, as schedulers count them."""
        per_chip = device_hardware(self).devices_per_chip
        return min(self.devices_per_host, self.devices_per_slice) // per_chip

    @property
    def num_hosts(self) -> int:
        """Returns the hosts of a slice of TPUs, or of all GPUs."""
        return self.devices_per_slice // min(self.devices_per_host, self.devices_per_slice)

    def usable_bytes(self, memory_gb: float | None) -> float:
        """Returns the bytes of memory that a plan may use on a device."""
        return memory_gb * 1e9 if memory_gb else _USABLE * self.memory_bytes

    @property
    def platform(self) -> str:
        """Returns "tpu", "gpu" or "cpu"."""
        if self.generation == "cpu":
            return "cpu"
        return "gpu" if self.is_gpu else "tpu"

    @property
    def topology(self) -> str:
        """Returns the name by which compilers know a slice, such as `v5p:4x4x2`."""
        return f"{self.generation}:{'x'.join(map(str, self.shape))}"


def parse_devices(name: str, num_slices: int = 1) -> Devices:
    """Reads the name of devices.

    Args:
        name: An accelerator of Google's (`v5p-64`, `v6e-16`), chips of a torus (`v6e:4x4`), GPUs
            (`h100:8`; `h100:2x8`, hosts and devices of each; `gb200:4x72`, racks or parts of racks
            that NVLink joins, and devices of each), or `here`.
        num_slices: The number of such slices, joined by the data centre's network.

    Returns:
        The devices.

    Raises:
        ValueError: If the name is none of these.

    Example:
        >>> parse_devices("v5p-64").topology, parse_devices("h100:2x8").num_devices
        ('v5p:2x4x4', 16)
    """
    if name == "here":
        return _devices_here()
    match = re.fullmatch(r"([a-z][\w]*(?:-\d+gb)?)(?:([-:])(\d{1,6}(?:x\d{1,4}){0,2}))", name)
    generation = generation_of(match[1]) if match else None
    if match is None or generation is None or num_slices < 1:
        raise ValueError(_no_devices(name, num_slices))
    row = HARDWARE[generation]
    sizes = tuple(map(int, match[3].split("x")))
    if row.is_gpu:
        shape, fits = (
            _gpu_shape(sizes, row.devices_per_host),
            match[2] == ":" and len(sizes) <= 2 and num_slices == 1,
        )
    elif match[2] == "-":
        shape, fits = _slice_shape(row, sizes[0]), len(sizes) == 1
    else:
        shape, fits = sizes, len(sizes) == row.torus_axes and _consists_of_hosts(sizes)
    if not fits or 0 in shape:
        raise ValueError(_no_devices(name, num_slices))
    return Devices(
        name=name,
        generation=generation,
        shape=shape,
        num_slices=num_slices,
        memory_bytes=row.memory_bytes,
        is_gpu=row.is_gpu,
    )


def _devices_here() -> Devices:
    """Returns the devices of this process and of those that it has joined."""
    devices = jax.devices()
    kind = devices[0].device_kind
    row, on_cpu = find_hardware(kind), devices[0].platform == "cpu"
    if row is None and not on_cpu:
        raise ValueError(f"`devices` is 'here', and no figures of a {kind} are known. Name others.")
    count = len(devices)
    per_host = jax.local_device_count()
    shape = (count // per_host, per_host)
    if row is None:
        memory = host_bytes() // count
        return Devices("here", "cpu", shape, 1, memory, is_gpu=True, are_here=True)
    return Devices(
        name="here",
        generation=row.kind,
        shape=shape,
        num_slices=1,
        memory_bytes=row.memory_bytes,
        is_gpu=row.is_gpu,
        are_here=True,
    )


def _no_devices(name: str, num_slices: int) -> str:
    return (
        f"`devices` is {name!r} and `num_slices` {num_slices}. Give an accelerator such as v5p-64 "
        "(which counts TensorCores) or v6e-16, chips such as v5p:4x4x2 or v6e:4x4 in hosts of 2 x "
        "2 chips, or GPUs such as h100:8 or h100:2x8 (hosts and devices of each, without slices), "
        f"of the generations {', '.join(HARDWARE)}."
    )


def _consists_of_hosts(chips: tuple[int, ...]) -> bool:
    """Returns whether there are hosts for the chips of a torus: of 2 x 2 each, or of one."""
    return math.prod(chips) == 1 or all(size % 2 == 0 for size in chips[:2])


def _gpu_shape(sizes: tuple[int, ...], per_host: int) -> tuple[int, ...]:
    """Returns hosts and devices of each; devices alone are of full hosts."""
    if len(sizes) != 1:
        return sizes
    count = sizes[0]
    return (1, count) if count % per_host else (count // per_host, per_host)


def _slice_shape(row: Hardware, count: int) -> tuple[int, ...]:
    """Returns the chips along each dim of the slice with this name, the most cubic there is."""
    chips, rest = divmod(count, row.cores_per_chip)
    if rest or not chips:
        return (0,)
    sizes = [n for n in range(1, chips + 1) if chips % n == 0]
    shapes = [
        tuple(sorted((*shape, chips // math.prod(shape)), key=lambda size: (size % 2, size)))
        for shape in itertools.combinations_with_replacement(sizes, row.torus_axes - 1)
        if chips % math.prod(shape) == 0
    ]
    # Of many chips slices are made of cubes of 4 x 4 x 4.
    of_cubes = [shape for shape in shapes if all(size % 4 == 0 for size in shape)]
    of_hosts = of_cubes or list(filter(_consists_of_hosts, shapes))
    return min(of_hosts, key=lambda shape: max(shape) - min(shape), default=(0,))


def device_hardware(devices: Devices) -> Hardware:
    """Returns the rates of devices and of the networks between them, per second.

    Args:
        devices: The devices of a plan, as `parse_devices` returns them.

    Returns:
        The figures of their generation; rough ones for emulated devices on CPUs.
    """
    if devices.generation != "cpu":
        return HARDWARE[devices.generation]
    # A core, and copies in memory: they rank plans, and are no measurement.
    return Hardware(
        kind="cpu",
        device_kinds=("cpu",),
        peak_tflops=0.05,
        memory_bytes=devices.memory_bytes,
        memory_bandwidth=1e10,
        link_bandwidth=2e9,
        network_bandwidth=2e9,
        devices_per_host=devices.num_devices,
        link_domain=devices.num_devices,
        link_latency=1e-4,
        network_latency=1e-4,
        torus_axes=0,
        peak_factors=(),
        source="ours",
    )


@dataclass(frozen=True, eq=False)
class AbsentDevice:
    """A stand-in for a device: it has what a mesh and the checks of a run read.

    As JAX's own devices, it equals only itself.

    Attributes:
        id: The index of the device.
        platform: Its platform, "tpu" or "gpu".
        device_kind: The name of its kind in JAX.
        process_index: The index of its host.
        coords: Its position on the torus; () for GPUs.
        slice_index: The index of its slice.
        core_on_chip: Its index on the chip.
    """

    id: int
    platform: str
    device_kind: str
    process_index: int
    coords: tuple[int, ...]
    slice_index: int | None
    core_on_chip: int = 0

    def addressable_memories(self) -> Sequence[Any]:
        """Returns the kinds of its memory."""
        return [SimpleNamespace(kind=kind) for kind in ("device", "pinned_host")]


def absent_devices(devices: Devices) -> Sequence[Any]:
    """Returns stand-ins for devices, of which a mesh can be made and a program cannot.

    Args:
        devices: The devices of a plan, as `parse_devices` returns them.

    Returns:
        [num_devices] stand-ins in the order of hosts and slices; real devices if they are here.
    """
    return jax.devices() if devices.are_here else _stand_ins(devices)


@lru_cache(maxsize=8)
def _stand_ins(devices: Devices) -> Sequence[AbsentDevice]:
    row = HARDWARE[devices.generation]
    kind = row.device_kinds[0]
    if devices.is_gpu:
        per_host = devices.devices_per_host
        return tuple(
            AbsentDevice(
                id=i,
                platform="gpu",
                device_kind=kind,
                process_index=i // per_host,
                coords=(),
                slice_index=None,
            )
            for i in range(devices.num_devices)
        )
    dims = (*devices.shape, 1)[:3]
    absent: list[AbsentDevice] = []
    for part in range(devices.num_slices):
        for chip in range(math.prod(dims)):
            x, y, z = chip % dims[0], chip // dims[0] % dims[1], chip // (dims[0] * dims[1])
            for core in range(row.devices_per_chip):
                index = len(absent)
                host = index // row.devices_per_host
                slice_index = part if devices.num_slices > 1 else None
                absent.append(
                    AbsentDevice(
                        id=index,
                        platform="tpu",
                        device_kind=kind,
                        process_index=host,
                        coords=(x, y, z),
                        slice_index=slice_index,
                        core_on_chip=core,
                    )
                )
    return tuple(absent)
