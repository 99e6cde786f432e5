"""What a task costs beyond its arithmetic: an MLP of width 8 over 4 groups, 32 microbatches.

    python benchmarks/dispatch.py

Prints microseconds per task for some schedules, and beside them, measured in turns with the rows in
the same run, what a jitted call and a copy to another device cost with JAX alone. Three in four
tasks hand something on to another group. The last column has what JaxPP took for the same step: it
was measured once, in November 2026, on another machine with two cores.
"""

import os
import statistics
import time
from collections.abc import Callable

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpipe import mpmd
from jaxpipe.mpmd import jaxpp

NUM_GROUPS, NUM_MICROBATCHES, WIDTH, ROUNDS, CALLS = 4, 32, 8, 15, 200
SCHEDULES = {
    "1F1B": jaxpp.Std1F1B(NUM_GROUPS),
    "interleaved 1F1B": jaxpp.Interleaved1F1B(2 * NUM_GROUPS, NUM_GROUPS),
    "zero bubble": jaxpp.ZeroBubble(NUM_GROUPS),
    "DualPipeV": jaxpp.DualPipeV(2 * NUM_GROUPS, NUM_GROUPS),
}
JAXPP = dict(zip(SCHEDULES, ("142 to 171", *["194 to 246"] * 3), strict=True))


def main() -> None:
    mesh = mpmd.MpmdMesh(Mesh(np.array(jax.devices()), ("stage",)), "stage")
    rows = {name: _step(mesh, schedule) for name, schedule in SCHEDULES.items()}
    rows |= {"a jitted call": _call(mesh.unstack[0]), "a device_put": _copy(*mesh.unstack[:2])}
    for run, _ in rows.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(ROUNDS):
        for name, (run, count) in rows.items():
            start = time.perf_counter()
            run()
            seconds[name].append((time.perf_counter() - start) / count)

    print(f"{'':<20}{'tasks':>6}{'us per task':>13}{'least':>8}{'JaxPP':>12}")
    for name, (_, count) in rows.items():
        median, least = statistics.median(seconds[name]), min(seconds[name])
        tasks = count if name in SCHEDULES else ""
        ours = f"{1e6 * median:>13.1f}{1e6 * least:>8.1f}"
        print(f"{name:<20}{tasks:>6}{ours}{JAXPP.get(name, ''):>12}")


Row = tuple[Callable[[], object], int]
"""What to time, and the number of tasks in it."""


def _step(mesh: mpmd.MpmdMesh, schedule: jaxpp.NamedSchedule) -> Row:
    weights = [0.1 * jnp.ones((WIDTH, WIDTH)) for _ in range(schedule.num_stages)]
    xs = jnp.ones((NUM_MICROBATCHES, 4, WIDTH))

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in weights:
            x = mpmd.mark_stage_end(jnp.tanh(x @ weight))
        return jnp.sum(x**2)

    def step(weights: list[jax.Array], xs: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        value, gradients = mpmd.treduce(
            lambda x: jax.value_and_grad(loss)(weights, x),
            xs,
            schedule=schedule,
            operation=mpmd.Add,
        )
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradients), value

    compiled = mpmd.mpmd_jit_with_loop(step, mesh).compile(weights, xs)
    weights, _ = compiled(weights, xs)
    tasks = schedule.tasks(NUM_MICROBATCHES)

    def run() -> object:
        return jax.block_until_ready(compiled(weights, xs))

    return run, sum(map(len, tasks))


def _call(mesh: Mesh) -> Row:
    where = NamedSharding(mesh, PartitionSpec())
    x = jax.device_put(jnp.ones((4, WIDTH)), where)
    weight = jax.device_put(jnp.ones((WIDTH, WIDTH)), where)
    call = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def run() -> object:
        y = x
        for _ in range(CALLS):
            y = call(y, weight)
        return jax.block_until_ready(y)

    return run, CALLS


def _copy(mesh: Mesh, other: Mesh) -> Row:
    here, there = NamedSharding(mesh, PartitionSpec()), NamedSharding(other, PartitionSpec())
    x = jax.device_put(jnp.ones((4, WIDTH)), here)

    def run() -> object:
        for _ in range(CALLS):
            y = jax.device_put(x, there)
        return jax.block_until_ready(y)

    return run, CALLS


if __name__ == "__main__":
    main()
