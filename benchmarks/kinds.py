"""Models whose layers differ: what a rank stores in one program beside programs of ranks.

    python benchmarks/kinds.py

Models are those of tests/harness/hybrid_models.py, on four emulated ranks under 1F1B with eight
microbatches and Adam. Weights are those of the fullest rank, by the shardings of stored parameters;
peaks are what `PipelinedModel.memory` says, and for one program what XLA allocates.
"""

import os
import sys
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
    print("| peak, MB: `mpmd` | one program | by XLA |")
    print("|---|---|---|---|---|---|---|")
    for name, make in HYBRIDS.items():
        own = make(SIZES)
        (ranks, weights, peak), (stored, said, measured) = of_ranks(own), of_program(own)
        figures = [weights, stored, peak, said, measured]
        print(f"| {name} | {ranks} | {' | '.join(f'{x / 1e6:.2f}' for x in figures)} |")


def pipeline(own: Hybrid, engine: str) -> Any:
    mesh = jp.make_mesh({"stage": 4}, devices=jax.devices()[:4])
    return jp.pipeline(own.model, schedule="1f1b", engine=engine, mesh=mesh, microbatches=8)


def of_ranks(own: Hybrid) -> tuple[str, int, int]:
    """Layers of stages, and bytes of weights and at the peak of the fullest rank."""
    pipe = pipeline(own, "mpmd")
    table = pipe.memory(own.params, own.batch(0), device="h100")
    layout = pipe.plan(pipe.shard(own.params)["layers"].num_layers).layout
    counts = " ".join(str(len(ids)) for ids in layout.stage_layer_ids)
    return counts, max(rank.weights for rank in table.ranks), max(table.totals)


def of_program(own: Hybrid) -> tuple[int, int, int]:
    """Bytes of weights, and at the peak: as said, and of the compiled program."""
    pipe = pipeline(own, "scheduled")
    table = pipe.memory(own.params, own.batch(0), device="h100")
    report = pipe.compile(own.params, own.batch(0), optimizer=optax.adam(1e-3))
    return table.ranks[0].weights, max(table.totals), report.memory.peak_bytes


if __name__ == "__main__":
    main()
