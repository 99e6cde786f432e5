"""Describes the devices of GPUs, for compiling with XLA:GPU without any GPU or driver.

XLA:GPU without a device compiles by a description of it. It does no autotuning then: sharding,
collectives, their order and buffers are those of the real program, the choice of kernels is not.
"""

import importlib.util
import re
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from .._input import clause


@dataclass(frozen=True)
class _Gpu:
    """What XLA:GPU asks about a device; the names are those of its text, but for the first."""

    description: str
    capability: int
    core_count: int
    fpus_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    clock_rate_ghz: float
    memory_bandwidth: int
    l2_cache_size: int
    device_memory_size: int


# As XLA has them in xla/backends/gpu/target_config/specs, where it has read them from devices.
_HOPPER = (9, 132, 128, 233_472, 232_448, 1.98)
_AMPERE = (8, 108, 64, 167_936, 166_912, 1.41)
_GPUS = {
    "a100-40gb": _Gpu(
        "NVIDIA A100-SXM4-40GB", *_AMPERE, 1_555_200_000_000, 41_943_040, 42_331_013_120
    ),
    "a100": _Gpu("NVIDIA A100-SXM4-80GB", *_AMPERE, 2_039_040_000_000, 41_943_040, 85_100_068_864),
    "h100": _Gpu("NVIDIA H100 80GB HBM3", *_HOPPER, 3_352_320_000_000, 52_428_800, 84_942_979_072),
    "h200": _Gpu("NVIDIA H200", *_HOPPER, 4_800_000_000_000, 52_428_800, 151_397_597_184),
    "b200": _Gpu(
        *("NVIDIA B200", 10, 148, 128, 233_472, 232_448, 1.965),
        *(7_672_320_000_000, 132_644_864, 191_514_411_008),
    ),
}


def gpu_topology(name: str) -> list[Any]:
    """Returns GPUs that can be compiled for, not computed on.

    Set `JAX_PLATFORMS=cpu` before JAX is used: with its CUDA plugin installed it looks for GPUs.

    Args:
        name: Generation and devices, such as `h100:8`, or hosts and devices of each, such as
            `h100:4x8`.

    Returns:
        The devices of all hosts; those of one host have one `process_index`.

    Raises:
        ValueError: If the plugin is missing or the name is none of a topology.
    """
    generation, hosts, devices = _parsed(name)
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        raise ValueError(
            f"The topology {name!r} needs XLA:GPU, which is in JAX's CUDA plugin and is not "
            'installed. Run `pip install "jaxpipe[aot-gpu]"`.'
        )
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology=f"1x{hosts}x{devices}",
            target_config=_target_config(_GPUS[generation]),
        )
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"XLA:GPU does not take the topology {name!r}: {clause(error)}") from None
    return list(topology.devices)


def is_gpu_topology(name: str) -> bool:
    """Tells whether a topology names a generation of GPUs.

    Args:
        name: A topology, such as `h100:8` or `v5p:2x2x1`.

    Returns:
        True for GPUs.

    Example:
        >>> is_gpu_topology("h100:4x8"), is_gpu_topology("v5p:2x2x1")
        (True, False)
    """
    return name.partition(":")[0] in _GPUS


def _parsed(name: str) -> tuple[str, int, int]:
    """Returns generation, hosts, and devices of each."""
    found = re.fullmatch(r"([\w-]+):(?:(\d{1,4})x)?(\d{1,4})", name)
    if found is None or found[1] not in _GPUS or 0 in (int(found[2] or 1), int(found[3])):
        raise ValueError(
            f"The topology is {name!r}. Give a generation of {', '.join(_GPUS)} and devices, such "
            "as h100:8, or hosts and devices of each, such as h100:4x8."
        )
    return found[1], int(found[2] or 1), int(found[3])


def _target_config(gpu: _Gpu) -> str:
    """Returns the text of a `GpuTargetConfigProto`."""
    facts = {name: value for name, value in vars(gpu).items() if name not in _NOT_FACTS}
    facts |= {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": 2048,
        "shared_memory_per_block": 49_152,
        "registers_per_core_limit": 65_536,
        "registers_per_block_limit": 65_536,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65_535,
        "block_dim_limit_z": 65_535,
    }
    lines = [f"  {name}: {value}" for name, value in facts.items()]
    capability = f"  cuda_compute_capability {{ major: {gpu.capability} }}"
    return "\n".join(
        [
            "gpu_device_info {",
            *lines,
            capability,
            "}",
            'platform_name: "CUDA"',
            "dnn_version_info { major: 9 minor: 10 }",
            f'device_description_str: "{gpu.description}"',
        ]
    )


_NOT_FACTS = ("description", "capability")
