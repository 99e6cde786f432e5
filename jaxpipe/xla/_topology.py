"""Describes the devices of a topology, for compiling without any TPU or GPU."""

import importlib.util
import os
from typing import Any

import jax
from jax.experimental import topologies

from .._input import clause
from ._gpu_topology import gpu_topology, is_gpu_topology


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
