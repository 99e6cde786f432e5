"""Describes the devices of a topology, for compiling without any TPU or GPU.

XLA:GPU without a device compiles by a description of it. It does no autotuning then: sharding,
collectives, their order and buffers are those of the real program, the choice of kernels is not.
"""

import importlib.util
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from .._input import clause
from ..devices import HARDWARE, GpuTarget

_GPUS = {kind: row for kind, row in HARDWARE.items() if row.gpu_target}


def compile_only_devices(topology: str, num_slices: int = 1) -> list[Any]:
    """Returns the devices of a topology; libtpu leaves this machine's own alone.

    Args:
        topology: TPUs, such as "v5p:2x2x1", or GPUs, such as "h100:8".
        num_slices: The number of slices of TPUs.

    Returns:
        The devices.

    Raises:
        ValueError: If the topology is unknown.
    """
    if jax.default_backend() != "tpu":  # away from TPUs libtpu must not look for them
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return topology_devices(topology, num_slices)


def topology_devices(name: str, num_slices: int = 1) -> list[Any]:
    """Returns TPUs or GPUs that can be compiled for, not computed on.

    Args:
        name: A topology of TPUs for `tpu_topology`, such as `v5p:2x2x1`, or of GPUs for
            `gpu_topology`, such as `h100:8` or `h100:4x8`.
        num_slices: The number of slices of TPUs.

    Returns:
        The devices.

    Raises:
        ValueError: If the compiler is missing or does not know the topology, or GPUs are to have
            slices.
    """
    if not is_gpu_topology(name):
        return tpu_topology(name, num_slices)
    if num_slices != 1:
        raise ValueError(
            f"`num_slices` is {num_slices} and the topology {name!r}. GPUs have no slices: give "
            "hosts and devices of each, such as h100:4x8."
        )
    return gpu_topology(name)


def tpu_topology(name: str, num_slices: int = 1) -> list[Any]:
    """Returns TPUs that can be compiled for; libtpu holds the compiler.

    Away from TPUs set `TPU_SKIP_MDS_QUERY=1` before JAX is used, and `ALLOW_MULTIPLE_LIBTPU_LOAD=1`
    if several processes compile at a time.
    """
    if num_slices < 1:
        raise ValueError(f"`num_slices` is {num_slices}. Give at least 1.")
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"The topology {name!r} needs libtpu, which holds the TPU compiler and is not "
            'installed. Run `pip install "jaxpipe[aot]"`.'
        )
    try:
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=name, num_slices=num_slices
        )
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"libtpu does not take the topology {name!r}: {clause(error)}. Give generation and "
            "chips, such as v5p:2x2x1, v5e:4x4, v6e:2x4 or tpu7x:2x2x1."
        ) from None
    return list(topology.devices)


def gpu_topology(name: str) -> list[Any]:
    """Returns GPUs that can be compiled for; those of one host have one `process_index`.

    Set `JAX_PLATFORMS=cpu` before JAX is used: with its CUDA plugin installed it looks for GPUs.
    """
    generation, hosts, devices = _parsed(name)
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        raise ValueError(
            f"The topology {name!r} needs XLA:GPU, which is in JAX's CUDA plugin and is not "
            'installed. Run `pip install "jaxpipe[aot-gpu]"`.'
        )
    row = _GPUS[generation]
    assert row.gpu_target is not None
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology=f"1x{hosts}x{devices}",
            target_config=_target_config(row.device_kinds[0], row.gpu_target),
        )
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"XLA:GPU does not take the topology {name!r}: {clause(error)}") from None
    return list(topology.devices)


def is_gpu_topology(name: str) -> bool:
    """Tells whether a topology names a generation of GPUs.

    Example:
        >>> is_gpu_topology("h100:4x8"), is_gpu_topology("v5p:2x2x1")
        (True, False)
    """
    return name.partition(":")[0] in _GPUS


def _parsed(name: str) -> tuple[str, int, int]:
    """Returns generation, hosts, and devices of each."""
    match = re.fullmatch(r"([\w-]+):(?:(\d{1,4})x)?(\d{1,4})", name)
    if match is None or match[1] not in _GPUS or 0 in (int(match[2] or 1), int(match[3])):
        raise ValueError(
            f"The topology is {name!r}. Give a generation of {', '.join(_GPUS)} and devices, such "
            "as h100:8, or hosts and devices of each, such as h100:4x8."
        )
    return match[1], int(match[2] or 1), int(match[3])


def _target_config(description: str, gpu: GpuTarget) -> str:
    """Returns the text of a `GpuTargetConfigProto`."""
    facts = vars(gpu) | {
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
    major = facts.pop("cuda_capability")
    lines = [f"  {name}: {value}" for name, value in facts.items()]
    capability = f"  cuda_compute_capability {{ major: {major} }}"
    return "\n".join(
        [
            "gpu_device_info {",
            *lines,
            capability,
            "}",
            'platform_name: "CUDA"',
            "dnn_version_info { major: 9 minor: 10 }",
            f'device_description_str: "{description}"',
        ]
    )
