"""Compiles a pipeline for its devices, or for those of a topology that is not there."""

import os
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from ...sharding import make_mesh
from ...xla import topology_devices
from ...xla.compile_report import CompileReport, report_compiled


def topology_mesh(mesh: Mesh, topology: str) -> Mesh:
    """Returns a mesh of the same sizes over the devices of a topology.

    Args:
        mesh: The mesh.
        topology: TPUs, such as "v5p:2x2x1", or GPUs, such as "h100:8".

    Returns:
        The mesh, for compiling only.

    Raises:
        ValueError: If the topology is unknown or has another number of devices.
    """
    if jax.default_backend() != "tpu":  # away from TPUs libtpu must not look for them
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    devices = topology_devices(topology)
    if len(devices) != mesh.size:
        sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
        raise ValueError(
            f"`devices` is {topology!r}, which has {len(devices)} devices, and the mesh of the "
            f"pipeline ({sizes}) {mesh.size}. Give a topology of as many."
        )
    return make_mesh(dict(mesh.shape), devices=devices)


def compile_report(function: Callable, mesh: Mesh, bubble: float, *arguments: Any) -> CompileReport:
    """Compiles a function and reports what the program needs.

    Args:
        function: A function from `jax.jit`.
        mesh: The mesh that it runs on.
        bubble: The share of the pipeline's time in which a device waits, by the schedule.
        *arguments: The shapes of its arguments, with shardings.

    Returns:
        The report, without the FLOPs of the model.
    """
    started = time.perf_counter()
    compiled = function.lower(*arguments).compile()
    seconds = time.perf_counter() - started
    return report_compiled(compiled, compiled.as_text() or "", mesh, seconds, bubble)
