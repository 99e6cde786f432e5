"""Names of devices as people write them, and stand-ins for devices that are absent.

`v5p-64` counts TensorCores, as Google's names of accelerators do, `v5p:4x4x2` chips of a torus,
`h100:2x8` hosts and devices of each, and `here` are the devices of this process.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..cost.devices import HARDWARE, Hardware
from ..train.estimate._fits import host_bytes
from ..xla._device_memory import DEVICE_BYTES, GENERATIONS, device_bytes

_CORES_PER_CHIP = {"v4": 2, "v5p": 2, "tpu7x": 2}
"""TensorCores of a chip, for generations whose names count them; the others count chips."""

_DEVICES_PER_CHIP = {"tpu7x": 2}

_ALIASES = {"v5litepod": "v5e", "v6litepod": "v6e", "tpu7x": "tpu7x", "v7x": "tpu7x"}

_KINDS = {
    "v4": "TPU v4",
    "v5e": "TPU v5 lite",
    "v5p": "TPU v5",
    "v6e": "TPU v6 lite",
    "tpu7x": "TPU7x",
}
_FLAT = ("v5e", "v6e")
"""Generations whose chips are joined in two dims, not three."""

_CHIPS_PER_HOST = 4
_GPUS_PER_HOST = 8


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
        per_chip = 1 if self.are_here else _DEVICES_PER_CHIP.get(self.generation, 1)
        return math.prod(self.shape) * per_chip

    @property
    def devices_per_domain(self) -> int:
        """Returns how many devices fast links join: a host of GPUs, or a slice of TPUs."""
        return self.shape[-1] if self.is_gpu else self.devices_per_slice

    @property
    def topology(self) -> str:
        """Returns the name by which compilers know a slice, such as `v5p:4x4x2`."""
        return f"{self.generation}:{'x'.join(map(str, self.shape))}"


def parse_devices(name: str, num_slices: int = 1) -> Devices:
    """Reads the name of devices.

    Args:
        name: An accelerator of Google's (`v5p-64`, `v6e-16`), chips of a torus (`v6e:4x4`), GPUs
            (`h100:8`, `h100:2x8`), or `here`.
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
    found = re.fullmatch(r"([a-z][\w]*(?:-\d+gb)?)(?:([-:])(\d{1,6}(?:x\d{1,4}){0,2}))", name)
    generation = _ALIASES.get(found[1], found[1]) if found else ""
    if found is None or generation not in DEVICE_BYTES or num_slices < 1:
        raise ValueError(_no_devices(name, num_slices))
    sizes = tuple(map(int, found[3].split("x")))
    is_gpu = generation not in _KINDS
    if is_gpu:
        shape, fits = _gpu_shape(sizes), found[2] == ":" and len(sizes) <= 2 and num_slices == 1
    elif found[2] == "-":
        shape, fits = _slice_shape(generation, sizes[0]), len(sizes) == 1
    else:
        shape, fits = sizes, len(sizes) == (2 if generation in _FLAT else 3)
    if not fits or 0 in shape:
        raise ValueError(_no_devices(name, num_slices))
    return Devices(name, generation, shape, num_slices, device_bytes(generation), is_gpu)


def _devices_here() -> Devices:
    """Returns the devices of this process and of those that it has joined."""
    devices = jax.devices()
    kind = devices[0].device_kind
    generation = "cpu" if devices[0].platform == "cpu" else GENERATIONS.get(kind)
    if generation is None:
        raise ValueError(f"`devices` is 'here', and no figures of a {kind} are known. Name others.")
    count = len(devices)
    memory = host_bytes() // count if generation == "cpu" else device_bytes(generation)
    per_host = jax.local_device_count()
    shape = (count // per_host, per_host)
    return Devices("here", generation, shape, 1, memory, generation not in _KINDS, are_here=True)


def _no_devices(name: str, num_slices: int) -> str:
    return (
        f"`devices` is {name!r} and `num_slices` {num_slices}. Give an accelerator such as v5p-64 "
        "(which counts TensorCores) or v6e-16, chips such as v5p:4x4x2 or v6e:4x4, or GPUs such as "
        f"h100:8 or h100:2x8 (hosts and devices of each, without slices), of the generations "
        f"{', '.join(DEVICE_BYTES)}."
    )


def _gpu_shape(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns hosts and devices of each; devices alone are of full hosts."""
    if len(sizes) != 1:
        return sizes
    count = sizes[0]
    return (1, count) if count % _GPUS_PER_HOST else (count // _GPUS_PER_HOST, _GPUS_PER_HOST)


def _slice_shape(generation: str, count: int) -> tuple[int, ...]:
    """Returns the chips along each dim of the slice with this name, the most cubic there is."""
    per_chip = _CORES_PER_CHIP.get(generation, 1)
    chips, rest = divmod(count, per_chip)
    if rest or not chips:
        return (0,)
    if generation in _FLAT:
        return next((a, chips // a) for a in range(math.isqrt(chips), 0, -1) if chips % a == 0)
    if chips == _CHIPS_PER_HOST:
        return (2, 2, 1)
    shapes = (
        (a, b, chips // a // b)
        for a in range(1, round(chips ** (1 / 3)) + 1)
        if chips % a == 0
        for b in range(a, math.isqrt(chips // a) + 1)
        if (chips // a) % b == 0
    )
    return min(shapes, key=lambda shape: shape[2] - shape[0])


def device_hardware(devices: Devices) -> Hardware:
    """Returns what devices and the networks between them do in a second.

    Args:
        devices: The devices.

    Returns:
        The figures of their generation; rough ones for emulated devices on CPUs.
    """
    if devices.generation != "cpu":
        return HARDWARE[devices.generation]
    count = devices.num_devices
    # A core, and copies in memory: they rank plans, and are no measurement.
    return Hardware(
        *("cpu", 0.05, devices.memory_bytes, 1e10, 2e9, 2e9, count, count, 1e-4, 1e-4, 0, ()),
        "ours",
    )


@dataclass(frozen=True)
class _MemoryKind:
    """A kind of memory of a device."""

    kind: str


@dataclass(frozen=True)
class AbsentDevice:
    """What a mesh and the checks of a run ask about a device.

    Attributes:
        id: Its index.
        platform: "tpu" or "gpu".
        device_kind: The name of its kind in JAX.
        process_index: Its host.
        coords: Its position on the torus; () for GPUs.
        slice_index: Its slice.
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
        return [_MemoryKind("device"), _MemoryKind("pinned_host")]


def absent_devices(devices: Devices) -> Sequence[Any]:
    """Returns stand-ins for devices: a mesh can be made of them, a program cannot.

    Args:
        devices: The devices.

    Returns:
        One for each device, in the order of JAX; the devices themselves if they are here.
    """
    if devices.are_here:
        return jax.devices()
    if devices.is_gpu:
        per_host = devices.shape[-1]
        return [
            AbsentDevice(i, "gpu", f"NVIDIA {devices.generation.upper()}", i // per_host, (), None)
            for i in range(devices.num_devices)
        ]
    dims = (*devices.shape, 1)[:3]
    cores = _DEVICES_PER_CHIP.get(devices.generation, 1)
    found: list[AbsentDevice] = []
    for part in range(devices.num_slices):
        for chip in range(math.prod(dims)):
            x, y, z = chip % dims[0], chip // dims[0] % dims[1], chip // (dims[0] * dims[1])
            for core in range(cores):
                index = len(found)
                host = index // (_CHIPS_PER_HOST * cores)
                kind = _KINDS[devices.generation]
                slice_index = part if devices.num_slices > 1 else None
                found.append(AbsentDevice(index, "tpu", kind, host, (x, y, z), slice_index, core))
    return found
