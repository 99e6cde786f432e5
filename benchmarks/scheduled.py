"""Schedules in one program against a loop that JAX differentiates, on emulated CPU devices.

    pip install "jaxpipe[train]"
    python benchmarks/scheduled.py
    python benchmarks/scheduled.py --compile    # how long compiling takes, by microbatches

Four ranks x two shards on however many cores there are: bubbles that compute nothing cost nothing
here, and what is computed in vain does. So the times are work, not waiting; what waiting would cost
on four devices is the last column, in the ticks of the schedule. Rows take turns, step by step.

The unpipelined scan does all the work on every rank, so a rank's share of its time is the least
that any row could take: "of the least" is what a row takes beyond that.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxpipe import models, schedules, sharding, spmd
from jaxpipe.autodiff import StagedModel, recompute, unpipelined
from jaxpipe.autodiff.staged_model import run_layers
from jaxpipe.kernels import dot_product_attention
from jaxpipe.schedules import analysis, lock_step
from jaxpipe.spmd import circular_engine, scheduled_engine

S, MICROBATCHES, ROWS, LENGTH = 4, 16, 4, 64
LOOP = "loop, differentiated by JAX"
CONFIG = models.LlamaConfig(
    base_emb_dim=128,
    base_num_decoder_layers=8,
    base_num_query_heads=4,
    base_num_kv_heads=4,
    base_mlp_dim=384,
    head_dim=32,
    vocab_size=512,
    logits_via_embedding=False,
)
COSTS = schedules.Costs(10, 20, 10)
"""With rematerialisation: an I computes F again."""


def main() -> None:
    parser = argparse.ArgumentParser(description="schedules in one program, on emulated devices")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of every row")
    parser.add_argument("--compile", action="store_true", help="only compile, for 8 to 64")
    args = parser.parse_args()
    compile_times() if args.compile else step_times(args.steps)


def step_times(steps: int) -> None:
    """Steps of every row."""
    mesh = sharding.make_mesh({"stage": S, "fsdp": 2}, devices=jax.devices())
    weights, batch_inputs, model = make(MICROBATCHES)
    rows: dict[str, tuple[Callable, lock_step.Ticks | None]] = {
        "unpipelined": (partial(plain, model), None),
        LOOP: (partial(differentiated, model, mesh), None),
        "circular": (partial(circular, model, mesh), None),
    }
    for name in ("1f1b", "interleaved_1f1b", "gpipe", "zero_bubble_h1", "zbv"):
        ticks = ticks_of(name, MICROBATCHES)
        rows[name] = partial(scheduled, model, mesh, ticks), ticks
    heads = f"{'of the loop':>13}{'of the least':>14}{'temp MB':>9}{'compile s':>11}  lock-step"
    print(f"{'row':<29}{'ms':>8}{heads}")
    with jax.set_mesh(mesh):
        compiled = {
            name: compile_row(run, weights, batch_inputs) for name, (run, _) in rows.items()
        }
        times = {name: [] for name in rows}
        for _ in range(steps):
            for name, row in compiled.items():
                times[name].append(timed(row.step, weights, batch_inputs))
    loop, least = min(times[LOOP]), min(times["unpipelined"]) / S
    for name, (_, ticks) in rows.items():
        row, fastest = compiled[name], min(times[name])
        print(
            f"{name:<29}{fastest * 1e3:>8.0f}{fastest / loop:>13.2f}{fastest / least:>14.2f}"
            f"{row.temp_bytes / 1e6:>9.1f}{row.seconds:>11.1f}  {price(ticks) if ticks else ''}"
        )


def compile_times() -> None:
    """Seconds to compile and lines of the program, by microbatches and so by ticks."""
    mesh = sharding.make_mesh({"stage": S, "fsdp": 2}, devices=jax.devices())
    print(f"{'schedule':<18}{'M':>4}{'ticks':>7}{'compile s':>11}{'lines':>8}")
    for name in ("1f1b", "interleaved_1f1b", "zbv"):
        for count in (8, 8, 16, 32, 64):  # the first one warms up
            weights, batch_inputs, model = make(count)
            ticks = ticks_of(name, count)
            with jax.set_mesh(mesh):
                row = compile_row(partial(scheduled, model, mesh, ticks), weights, batch_inputs)
            lines = row.step.as_text().count("\n")
            print(
                f"{name:<18}{count:>4}{lock_step.num_ticks(ticks):>7}{row.seconds:>11.1f}{lines:>8}"
            )


def ticks_of(name: str, microbatches: int) -> lock_step.Ticks:
    schedule = schedules.build(name, ranks=S, microbatches=microbatches)
    return lock_step.to_lock_step(schedules.check(schedule), COSTS)


def price(ticks: lock_step.Ticks) -> str:
    """What the schedule costs with and without lock-step, beside the work of a rank."""
    lock = lock_step.simulate_ticks(ticks, COSTS)
    work = max(analysis.busy_times(lock))
    free = schedules.makespan(schedules.simulate(ticks.schedule, COSTS))
    return (
        f"{lock_step.num_ticks(ticks)} ticks, {schedules.makespan(lock) / work:.3f} of the work "
        f"of a rank ({free / work:.3f} without)"
    )


class Compiled(NamedTuple):
    """A step that has run once, bytes of its temporaries, and the seconds it took to compile."""

    step: Any
    temp_bytes: int
    seconds: float


def compile_row(run: Callable, weights: Any, batch_inputs: Any) -> Compiled:
    start = time.perf_counter()
    compiled = jax.jit(run).lower(weights, batch_inputs).compile()
    seconds = time.perf_counter() - start
    jax.block_until_ready(compiled(weights, batch_inputs))
    memory = compiled.memory_analysis()
    assert memory is not None, "CPUs tell"
    return Compiled(compiled, memory.temp_size_in_bytes, seconds)


def timed(step: Callable, weights: Any, batch_inputs: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(step(weights, batch_inputs))
    return time.perf_counter() - start


def make(num_microbatches: int) -> tuple[Any, Any, StagedModel]:
    """Weights with stages [num_layers, ...], a batch, and the model."""
    tree = models.llama_weights(CONFIG)
    key = jax.random.key(0)
    weights = models.initialize({name: tree[name] for name in ("embed", "head")}, key)
    weights["stages"] = models.initialize_layers(
        tree["layer"], key, (CONFIG.base_num_decoder_layers,)
    )
    tokens = np.random.default_rng(0).integers(0, 512, (num_microbatches, ROWS, LENGTH + 1))
    shape = (num_microbatches, ROWS, LENGTH)
    batch_inputs = {
        "tokens": tokens[..., :-1],
        "targets": tokens[..., 1:],
        "positions": np.broadcast_to(np.arange(LENGTH), shape),
        "segment_ids": np.ones(shape, int),
    }
    batch_inputs = {name: jnp.asarray(x, jnp.int32) for name, x in batch_inputs.items()}
    batch_inputs["target_weights"] = jnp.full(shape, 1 / np.prod(shape), jnp.float32)
    embed, layer, loss = models.llama(
        CONFIG, attention=dot_product_attention, constrain=sharding.Constrain()
    )

    def stage(weights: Any, x: Any, inputs_m: Any, keys: Any) -> Any:
        return run_layers(layer, weights, x, inputs_m, keys)

    return weights, batch_inputs, StagedModel(embed, stage, loss)


def plain(model: StagedModel, weights: Any, batch_inputs: Any) -> Any:
    stages = jax.tree.map(lambda x: x[:, None], weights["stages"])
    recomputing = StagedModel(model.embed, recompute(model.stage), model.loss)
    return unpipelined.value_and_grad(recomputing, weights | {"stages": stages}, batch_inputs)


def circular(model: StagedModel, mesh: Any, weights: Any, batch_inputs: Any) -> Any:
    stages = jax.tree.map(lambda x: x.reshape(1, S, -1, *x.shape[1:]), weights["stages"])
    return circular_engine.circular_value_and_grad(
        model, weights | {"stages": stages}, batch_inputs, mesh=mesh
    )


def scheduled(
    model: StagedModel, mesh: Any, ticks: lock_step.Ticks, weights: Any, batch_inputs: Any
) -> Any:
    num_stages = ticks.schedule.num_stages
    stages = jax.tree.map(lambda x: x.reshape(num_stages, -1, *x.shape[1:]), weights["stages"])
    stages = spmd.to_ranks(stages, ticks.schedule)
    once = spmd.Gather("once")  # nothing is split or gathered, and gradients add up in place
    return scheduled_engine.scheduled_value_and_grad(
        model,
        weights | {"stages": stages},
        batch_inputs,
        ticks=ticks,
        mesh=mesh,
        gather=once,
        boundary_gather=once,
    )


def differentiated(model: StagedModel, mesh: Any, weights: Any, batch_inputs: Any) -> Any:
    """The usual pipeline in JAX: a scan over ticks with a permute, and `jax.grad` of it all."""
    stages = jax.tree.map(lambda x: x.reshape(S, -1, *x.shape[1:]), weights["stages"])

    def rank(stages, x, batch_inputs):
        index = lax.axis_index("stage")
        stages = jax.tree.map(lambda w: w[0], stages)
        ring = [(r, (r + 1) % S) for r in range(S)]

        def tick(carry, t):
            arrived, outputs = carry
            m = jnp.clip(t - index, 0, MICROBATCHES - 1)
            at = partial(jax.tree.map, lambda a: lax.dynamic_index_in_dim(a, m, keepdims=False))
            x_m = jnp.where(index == 0, at(x), arrived)
            y, _ = recompute(model.stage)(stages, x_m, at(batch_inputs), ())
            leaves = jnp.where(t >= index, y, outputs[m])
            outputs = lax.dynamic_update_index_in_dim(outputs, leaves, m, 0)
            return (lax.ppermute(y, "stage", ring), outputs), None

        varying = lambda a: lax.pcast(a, "stage", to="varying")  # noqa: E731
        x, batch_inputs = jax.tree.map(varying, (x, batch_inputs))
        start = jnp.zeros_like(x[0]), jnp.zeros_like(x)
        (_, outputs), _ = lax.scan(tick, start, jnp.arange(MICROBATCHES + S - 1))
        return lax.psum(jnp.where(index == S - 1, outputs, 0), "stage")

    stage_dim, whole = PartitionSpec("stage"), PartitionSpec()
    pipeline = jax.shard_map(
        rank, mesh=mesh, in_specs=(stage_dim, whole, whole), out_specs=whole, axis_names={"stage"}
    )

    def loss(weights):
        x = jax.vmap(model.embed, (None, 0))(weights["embed"], batch_inputs)
        y = pipeline(weights["stages"], x, batch_inputs)
        head = {"head": weights["head"]}
        losses = lax.map(lambda batch: model.loss(head, *batch)[0], (y, batch_inputs))
        return jnp.sum(losses)

    return jax.value_and_grad(loss)(weights | {"stages": stages})


if __name__ == "__main__":
    main()
