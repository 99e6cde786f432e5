"""Describes the devices of GPUs, for compiling with XLA:GPU without any GPU or driver.

XLA:GPU without a device compiles by a description of it. It does no autotuning then: sharding,
collectives, their order and buffers are those of the real program, the choice of kernels is not.
"""

import importlib.util
import re
from typing import Any

import jax
from jax.experimental import topologies

from .._input import clause
from ..devices import HARDWARE, GpuTarget

_GPUS = {kind: row for kind, row in HARDWARE.items() if row.gpu_target}


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
    found = re.fullmatch(r"([\w-]+):(?:(\d{1,4})x)?(\d{1,4})", name)
    if found is None or found[1] not in _GPUS or 0 in (int(found[2] or 1), int(found[3])):
        raise ValueError(
            f"The topology is {name!r}. Give a generation of {', '.join(_GPUS)} and devices, such "
            "as h100:8, or hosts and devices of each, such as h100:4x8."
        )
    return found[1], int(found[2] or 1), int(found[3])


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
