"""Models whose layers differ: what a rank stores in one program beside programs of ranks.

    python benchmarks/kinds.py

Models are those of tests/harness/hybrid_models.py, on four emulated ranks under 1F1B with eight
microbatches and Adam. Weights are the bytes of the stored arrays on the fullest device. Peaks are
what `PipelinedModel.memory` says; for one program what XLA allocates; and for programs of ranks the
largest sum of the arrays that are alive on a device when a program of its rank starts, and what XLA
allocates for the program.
"""

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import jax
import optax

import jaxpipe as jp
from harness.hybrid_models import HYBRIDS, Hybrid, Sizes

SIZES = Sizes(rows=16, tokens=32, embed=64, heads=4, vocab=256)


def main() -> None:
    print("| model | layers of stages | weights, MB: `mpmd` | one program ", end="")
    print("| peak, MB: `mpmd` | one program | by XLA | `mpmd`, measured |")
    print("|---|---|---|---|---|---|---|---|")
    for name, make in HYBRIDS.items():
        own = make(SIZES)
        ranks, program = pipeline(own, "mpmd"), pipeline(own, "scheduled")
        stored = ranks.shard(own.params)
        layout = ranks.plan(stored["layers"].num_layers).layout
        counts = " ".join(str(len(ids)) for ids in layout.stage_layer_ids)
        weights = [fullest(stored), fullest(program.shard(own.params))]
        report = program.compile(own.params, own.batch(0), optimizer=optax.adam(1e-3))
        peaks = [said(ranks, own), said(program, own), report.memory.peak_bytes]
        peaks.append(peak_of_ranks(ranks, own))
        figures = " | ".join(f"{x / 1e6:.2f}" for x in weights + peaks)
        print(f"| {name} | {counts} | {figures} |", flush=True)


def pipeline(own: Hybrid, engine: str) -> Any:
    mesh = jp.make_mesh({"stage": 4}, devices=jax.devices()[:4])
    return jp.pipeline(own.model, schedule="1f1b", engine=engine, mesh=mesh, microbatches=8)


def said(pipe: Any, own: Hybrid) -> int:
    """Bytes at the peak of the fullest rank, by `memory`."""
    return max(pipe.memory(own.params, own.batch(0), device="h100").totals)


def fullest(tree: Any) -> int:
    """Bytes of stored arrays on the device that has most of them."""
    held = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(tree):
        for array in getattr(leaf, "local_arrays", [leaf]):
            for shard in array.addressable_shards:
                held[shard.device] += shard.data.nbytes
    return max(held.values())


def peak_of_ranks(pipe: Any, own: Hybrid) -> int:
    """Bytes at the peak of a train step on the fullest device, measured while it runs."""
    tx = pipe.optimizer(optax.adam(1e-3))

    def step(params: Any, state: Any, batch: Any) -> Any:
        (value, _), grads = pipe.value_and_grad(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    batch, others = own.batch(0), jax.live_arrays()
    params = pipe.shard(own.params)
    state = tx.init(params)
    compiled = pipe.jit(step, donate_argnums=(0, 1)).lower(params, state, batch).compile()
    known, peaks = {id(array) for array in others}, [0]

    def watched(instruction: Any, thunk: Callable) -> Callable:
        if type(instruction).__name__ != "RunTask":
            return thunk
        device = pipe.mesh.devices.flat[instruction.rank]
        memory = compiled.programs[f"{instruction.name}@{instruction.rank}"].memory_analysis()
        added = memory.temp_size_in_bytes + memory.output_size_in_bytes

        def run(slots: list[Any]) -> None:
            alive = {  # by address: two arrays may share a buffer
                array.unsafe_buffer_pointer(): array.nbytes
                for array in jax.live_arrays()
                if array.devices() == {device} and id(array) not in known
            }
            peaks.append(sum(alive.values()) + added - memory.alias_size_in_bytes)
            thunk(slots)

        return run

    step_of_ranks = compiled.with_thunks(watched)
    gc.collect()  # arrays that tracing has left
    jax.block_until_ready(step_of_ranks(params, state, batch))
    return max(peaks)


if __name__ == "__main__":
    main()
