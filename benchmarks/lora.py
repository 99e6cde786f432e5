"""LoRA against full training, under 1F1B and a zero-bubble schedule: time and memory.

    python benchmarks/lora.py

Simulated times take a forward as 10, its recomputation and the gradient of the input as 20, and the
gradient of the weights as 10; with LoRA that of the base weights is gone. Measured are the CPU time
of a step on four emulated devices, where waiting costs nothing, and what the compiled program of a
device allocates: arguments, results and temporaries. Adam's moments are counted, not measured.
Every figure is a ratio to full training under 1F1B in the same run.
"""

import argparse
import os
import time
from typing import Any, NamedTuple

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp

import jaxpipe as jp
from jaxpipe import schedules

S, M, L, ROWS, T, D, F, RANK = 4, 16, 8, 2, 64, 256, 1024, 4
SCHEDULES = "1f1b", "zero_bubble_h1"


class Row(NamedTuple):
    """Figures of one way to train: simulated time, CPU seconds, bytes, bytes of Adam's moments."""

    simulated: float
    seconds: float
    program_bytes: int
    moment_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description="LoRA against full training, on emulated devices")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of every row")
    args = parser.parse_args()
    print("| parameters | schedule | simulated time | bubble | CPU time ", end="")
    print("| program's memory | Adam's moments |")
    print("|---|---|---|---|---|---|---|")
    kinds = [(name, lora) for lora in (False, True) for name in SCHEDULES]
    programs = [program(*kind) for kind in kinds]
    seconds = [[] for _ in kinds]
    for _ in range(args.steps):  # rows take turns
        for times, (step, arguments, _) in zip(seconds, programs, strict=True):
            start = time.process_time()
            jax.block_until_ready(step(*arguments))
            times.append(time.process_time() - start)
    rows = [
        Row(simulated(*kind)[0], min(times), *sizes)
        for kind, times, (_, _, sizes) in zip(kinds, seconds, programs, strict=True)
    ]
    for (name, lora), row in zip(kinds, rows, strict=True):
        ratios = [f"{mine / first:.2f}" for mine, first in zip(row, rows[0], strict=True)]
        bubble = f"{simulated(name, lora)[1]:.0%}"
        cells = ["LoRA" if lora else "all", f"`{name}`", ratios[0], bubble, *ratios[1:]]
        print(f"| {' | '.join(cells)} |")


def simulated(name: str, lora: bool) -> tuple[float, float]:
    """Returns the time of a step, and the fraction of it in which ranks wait."""
    extra = 2 * RANK * (D + F) / (2 * D * F) if lora else 0.0
    costs = schedules.Costs(10 * (1 + extra), 20 * (1 + extra), 10 * extra if lora else 10)
    timeline = schedules.simulate(schedules.build(name, ranks=S, microbatches=M), costs)
    busy = sum(step.end - step.start for step in timeline.rows[0])
    makespan = schedules.makespan(timeline)
    return float(makespan), float(1 - busy / makespan)


def program(name: str, lora: bool) -> tuple[Any, tuple, tuple[int, int]]:
    """Compiles a step; returns it, its arguments, and bytes of a device."""
    mesh = jp.make_mesh({"stage": S})
    model = jp.Model(embed, lora_layer if lora else layer, loss)
    frozen = is_frozen if lora else None
    pipe = jp.pipeline(model, schedule=name, mesh=mesh, microbatches=M, frozen=frozen)
    params = pipe.shard(init(lora))
    batch = {"x": jnp.ones((M * ROWS, T, D))}
    step = pipe.jit(pipe.value_and_grad).lower(params, batch).compile()
    memory = step.memory_analysis()
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    trainable, _ = pipe.partition(params)
    moments = sum(2 * x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(trainable))
    return step, (params, batch), (used, moments)


def init(lora: bool) -> dict[str, Any]:
    """Returns parameters, with "base" and "lora" in every layer if there is LoRA."""

    def normal(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape) / shape[0] ** 0.5

    def one(key: jax.Array) -> dict[str, Any]:
        keys = jax.random.split(key, 4)
        base = {"up": normal(keys[0], D, F), "down": normal(keys[1], F, D)}
        shapes = {"up": (D, F), "down": (F, D)}
        adapters = {
            name: {"a": normal(k, n, RANK), "b": jnp.zeros((RANK, m))}
            for k, (name, (n, m)) in zip(keys[2:], shapes.items(), strict=True)
        }
        return {"base": base, "lora": adapters} if lora else base

    layers = [one(key) for key in jax.random.split(jax.random.key(0), L)]
    return {"embed": jnp.ones(D), "layers": layers, "head": jnp.ones(D)}


def is_frozen(path: str, leaf: Any) -> bool:
    return "lora" not in path


def embed(w: Any, batch: Any) -> Any:
    return batch["x"] * w


def layer(w: Any, x: Any, batch: Any) -> Any:
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def lora_layer(w: Any, x: Any, batch: Any) -> Any:
    def dense(name: str, x: jax.Array) -> jax.Array:
        lora = w["lora"][name]
        return x @ w["base"][name] + (x @ lora["a"]) @ lora["b"]

    return x + dense("down", jnp.tanh(dense("up", x)))


def loss(w: Any, x: Any, batch: Any) -> Any:
    return jnp.mean(jnp.square(x * w - batch["x"]))


if __name__ == "__main__":
    main()
