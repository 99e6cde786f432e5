"""Compiles a pipeline for its devices, or for those of a topology that is not there."""

import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from ...sharding import make_mesh
from ...xla import compile_only_devices
from ...xla.compile_report import CompileReport, report_compiled


def topology_mesh(mesh: Mesh, topology: str) -> Mesh:
    """Returns a mesh of the same sizes over the devices of a topology, such as "v5p:2x2x1"."""
    devices = compile_only_devices(topology)
    if len(devices) != mesh.size:
        sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
        raise ValueError(
            f"`devices` is {topology!r}, which has {len(devices)} devices, and the mesh of the "
            f"pipeline ({sizes}) {mesh.size}. Give a topology of as many."
        )
    return make_mesh(dict(mesh.shape), devices=devices)


def train_step(pipe: Any, optimizer: Any) -> Callable:
    """Returns `(params, state, batch, *key) -> (params, state, loss)`, one step of training."""

    def step(params: PyTree, state: PyTree, batch: PyTree, *key: Any) -> tuple[Any, Any, Any]:
        (value, _), grads = pipe.value_and_grad(params, batch, *key)
        trainable, frozen = pipe.partition(params)
        updates, state = optimizer.update(grads, state, trainable)
        moved = jax.tree.map(lambda w, change: (w + change).astype(w.dtype), trainable, updates)
        return pipe.combine(moved, frozen), state, value

    return step


def compile_report(function: Callable, mesh: Mesh, bubble: float, *arguments: Any) -> CompileReport:
    """Compiles a function and reports what the program needs; `bubble` is that of the schedule."""
    started = time.perf_counter()
    compiled = function.lower(*arguments).compile()
    seconds = time.perf_counter() - started
    return report_compiled(compiled, compiled.as_text() or "", mesh, seconds, bubble)
