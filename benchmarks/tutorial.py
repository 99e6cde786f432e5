"""A small transformer as programs of four groups, and in one plain program: start-up and work.

    pip install "jaxpipe[train]" flax
    python benchmarks/tutorial.py

Start-up is tracing, compiling and the first step, in a process of its own for each row. CPU seconds
per step count the work of all threads, so that waiting costs nothing and what is done twice shows.
The last column has the start-up of JaxPP's tutorial with the same model: it was measured once, in
November 2026, on another machine with two cores, where plain jit took 4.2 seconds.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax.sharding import Mesh

from jaxpipe import mpmd
from jaxpipe.mpmd import jaxpp

NUM_LAYERS, WIDTH, LENGTH, ROWS, NUM_MICROBATCHES, STEPS = 8, 256, 256, 8, 4, 6
SCHEDULES = {
    "plain jit": None,
    "4 stages, 1F1B": jaxpp.Std1F1B(4),
    "8 stages, interleaved": jaxpp.Interleaved1F1B(8, 4),
    "8 stages, DualPipeV": jaxpp.DualPipeV(8, 4),
}
JAXPP = dict(zip(SCHEDULES, ("4.2", "12.8", "25.8", "45"), strict=True))


class Block(nn.Module):
    @nn.remat
    @nn.jit
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        attended = nn.MultiHeadDotProductAttention(num_heads=8, qkv_features=WIDTH // 8)(x)
        x = nn.LayerNorm()(x + attended)
        hidden = nn.gelu(nn.Dense(features=4 * WIDTH)(x))
        return nn.LayerNorm()(x + nn.Dense(features=WIDTH)(hidden))


class Transformer(nn.Module):
    num_stages: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(NUM_LAYERS):
            x = Block(name=f"block_{i}")(x)
            if (i + 1) % (NUM_LAYERS // self.num_stages) == 0:
                x = mpmd.mark_stage_end(x)
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description="start-up and work of programs of many groups")
    parser.add_argument("--row", choices=SCHEDULES, help="one row, in this process")
    row = parser.parse_args().row
    if row is not None:
        print(*measure(SCHEDULES[row]))
        return
    heads = f"{'start-up s':>12}{'of plain':>10}{'CPU s a step':>14}{'of plain':>10}"
    print(f"{'row':<24}{heads}{'JaxPP: s':>10}")
    plain: list[float] = []
    for name in SCHEDULES:
        command = [sys.executable, __file__, "--row", name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        start_up, work = map(float, done.stdout.split()[-2:])
        plain = plain or [start_up, work]
        shares = f"{start_up / plain[0]:>10.2f}{work:>14.3f}{work / plain[1]:>10.2f}"
        print(f"{name:<24}{start_up:>12.2f}{shares}{JAXPP[name]:>10}", flush=True)


def measure(schedule: jaxpp.NamedSchedule | None) -> tuple[float, float]:
    """Seconds until the first step is done, and CPU seconds of a later one."""
    model = Transformer(schedule.num_stages if schedule is not None else 1)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, LENGTH, WIDTH)), jnp.float32)
    params = jax.jit(model.init)(jax.random.key(0), x)["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))
    start = time.perf_counter()
    step = prepare(schedule, state, x)
    state, _ = jax.block_until_ready(step(state, x))
    start_up = time.perf_counter() - start
    state, _ = jax.block_until_ready(step(state, x))
    before = time.process_time()
    for _ in range(STEPS):
        state, loss = step(state, x)
    jax.block_until_ready((state, loss))
    return start_up, (time.process_time() - before) / STEPS


def prepare(schedule: jaxpp.NamedSchedule | None, state: Any, x: jax.Array) -> Callable:
    # DualPipeV needs two microbatches for every group.
    count = 8 if isinstance(schedule, jaxpp.DualPipeV) else NUM_MICROBATCHES

    def loss_of(params: Any, state: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((state.apply_fn({"params": params}, x) - 1) ** 2)

    def train_step(state: Any, x: jax.Array) -> Any:
        loss, gradients = mpmd.treduce(
            lambda x: jax.value_and_grad(loss_of)(state.params, state, x),
            x.reshape(count, -1, *x.shape[1:]),
            schedule=schedule,
            operation=mpmd.Add,
        )
        return state.apply_gradients(grads=gradients), loss

    if schedule is None:
        return jax.jit(train_step)
    mesh = mpmd.MpmdMesh(Mesh(np.array(jax.devices()), ("stage",)), "stage")
    return mpmd.mpmd_jit_with_loop(train_step, mesh).compile(state, x)


if __name__ == "__main__":
    main()
