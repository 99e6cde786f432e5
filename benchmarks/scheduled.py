"""Schedules in one program against the plain program, on emulated CPU devices.

    pip install "jaxpipe[train]"
    python benchmarks/scheduled.py
    python benchmarks/scheduled.py --compile    # how long compiling takes, by microbatches

A small transformer on four ranks x two shards, on however many cores there are: bubbles that
compute nothing cost nothing here, and what is computed in vain does. So the times are work, not
waiting; what waiting would cost on four devices is the last column, by the schedule's timeline.
Rows take turns, step by step. All store what a layer is given and compute the rest again, and
weights are whole on both shards during a step.

The plain program does all the work on every rank, so a rank's share of its time is the least that
any row could take: "of the least" is what a row takes beyond that, and "CPU" the same of CPU time.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from jaxpipe import schedules

jp.emulate_devices(8)

S, SHARDS, ROWS, T = 4, 2, 4, 64  # ranks, devices of a rank, rows of a microbatch, tokens
L, D, H, F, V = 8, 128, 4, 384, 512  # layers, embed, heads, MLP, vocab
PLAIN, LOOP = "the plain program", "loop, differentiated by JAX"
FAMILIES = ("circular", "1f1b", "interleaved_1f1b", "gpipe", "zero_bubble_h1", "zbv")


def rms_norm(x: Any, scale: Any) -> Any:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def embed(w: Any, batch: Any) -> Any:
    return w[batch["tokens"]]


def layer(w: Any, x: Any, batch: Any) -> Any:
    del batch
    h = rms_norm(x, w["norm"])
    q, k, v = ((h @ w[name]).reshape(*h.shape[:2], H, D // H) for name in "qkv")
    scores = jnp.einsum("bthc,bshc->bhts", q, k) / (D // H) ** 0.5
    scores = jax.nn.softmax(jnp.where(jnp.tri(T, dtype=bool), scores, -1e30))
    x += jnp.einsum("bhts,bshc->bthc", scores, v).reshape(h.shape) @ w["out"]
    h = rms_norm(x, w["mlp_norm"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def loss(w: Any, x: Any, batch: Any) -> Any:
    logits = rms_norm(x, w["norm"]) @ w["logits"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def layers_of(weights: Any, x: Any, batch: Any) -> Any:
    """The layers [n, ...], one after the other, which are computed again in the backward."""
    return lax.scan(lambda x, w: (jax.checkpoint(layer)(w, x, batch), None), x, weights)[0]


def plain(microbatches: int, params: Any, batch: Any) -> Any:
    """The loss and gradients of a program without a pipeline, a microbatch after the other."""

    def loss_of(params: Any, batch: Any) -> Any:
        x = layers_of(params["layers"], embed(params["embed"], batch), batch)
        return loss(params["head"], x, batch)

    def add(total: Any, batch: Any) -> Any:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_of)(params, batch)), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    total, _ = lax.scan(add, zeros, cut(batch, microbatches))
    return jax.tree.map(lambda x: lax.pmean(x / microbatches, "fsdp"), total)


def differentiated(microbatches: int, params: Any, batch: Any) -> Any:
    """The usual pipeline in JAX: a scan over ticks with a permute, and `jax.grad` of it all."""
    index, batches = lax.axis_index("stage"), cut(batch, microbatches)

    def loss_of(params: Any) -> Any:
        embedded = jax.vmap(embed, (None, 0))(params["embed"], batches)

        def tick(carry: Any, t: Any) -> Any:
            arrived, outputs = carry
            m = jnp.clip(t - index, 0, microbatches - 1)
            y = layers_of(params["layers"], jnp.where(index == 0, embedded[m], arrived), batches)
            leaves = jnp.where(t >= index, y, outputs[m])
            outputs = lax.dynamic_update_index_in_dim(outputs, leaves, m, 0)
            return (lax.ppermute(y, "stage", [(r, (r + 1) % S) for r in range(S)]), outputs), None

        start = jnp.zeros_like(embedded[0]), jnp.zeros_like(embedded)
        (_, outputs), _ = lax.scan(tick, start, jnp.arange(microbatches + S - 1))
        head = partial(loss, params["head"])
        losses = lax.map(lambda both: head(*both), (outputs, batches))
        return jnp.where(index == S - 1, losses.mean(), 0) / SHARDS

    value, grads = jax.value_and_grad(loss_of)(params)
    layers, rest = grads.pop("layers"), lax.psum((value, grads), ("stage", "fsdp"))
    return rest[0], rest[1] | {"layers": lax.psum(layers, "fsdp")}


def cut(batch: Any, microbatches: int) -> Any:
    return jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)


def numbers(microbatches: int) -> tuple[Any, Any]:
    """Parameters and a batch."""
    rng = np.random.default_rng(0)
    layers = dict.fromkeys(("q", "k", "v", "out"), (D, D)) | {"down": (F, D)}
    layers |= {"gate": (D, F), "up": (D, F)}

    def normal(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32) / shape[-2] ** 0.5

    params = {
        "embed": normal(V, D),
        "layers": {name: normal(L, *shape) for name, shape in layers.items()}
        | {"norm": np.ones((L, D), np.float32), "mlp_norm": np.ones((L, D), np.float32)},
        "head": {"norm": np.ones(D, np.float32), "logits": normal(D, V)},
    }
    tokens = rng.integers(0, V, (microbatches * ROWS, T + 1))
    return params, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


class Row(NamedTuple):
    """A compiled step, its arguments and the seconds it took to compile."""

    step: Any
    args: tuple[Any, Any]
    seconds: float
    bubble: str = ""

    def run(self) -> tuple[float, float]:
        """Returns the seconds and the CPU seconds of a step."""
        start, cpu_start = time.perf_counter(), time.process_time()
        jax.block_until_ready(self.step(*self.args))
        return time.perf_counter() - start, time.process_time() - cpu_start


def by_hand(function: Callable, microbatches: int, layer_spec: PartitionSpec) -> Row:
    """Compiles a function of one device, with the rows of a shard."""
    mesh = jp.make_mesh({"stage": S, "fsdp": SHARDS})
    specs = {"embed": PartitionSpec(), "layers": layer_spec, "head": PartitionSpec()}
    mapped = jax.shard_map(
        partial(function, microbatches),
        mesh=mesh,
        in_specs=(specs, PartitionSpec("fsdp")),
        out_specs=(PartitionSpec(), specs),
        check_vma=False,
    )
    params, batch = numbers(microbatches)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    params = jax.device_put(params, shardings)
    batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("fsdp")))
    return compile_row(jax.jit(mapped), (params, batch))


def pipelined(schedule: str, microbatches: int) -> Row:
    pipe = jp.pipeline(
        jp.Model(embed, layer, loss),
        schedule=schedule,
        mesh={"stage": S, "fsdp": SHARDS},
        microbatches=microbatches,
        gather="once",
        remat="none",
        layer_remat="full",
    )
    params, batch = numbers(microbatches)
    args = pipe.shard(params), jax.tree.map(jnp.asarray, batch)
    row = compile_row(pipe.jit(pipe.value_and_grad), args)
    return row._replace(bubble=f"{schedules.bubble_fraction(pipe.timeline()):.0%}")


def compile_row(step: Any, args: tuple[Any, Any]) -> Row:
    start = time.perf_counter()
    return Row(step.lower(*args).compile(), args, time.perf_counter() - start)


def step_times(steps: int, microbatches: int = 16) -> None:
    """Prints steps of every row."""
    rows = {
        PLAIN: by_hand(plain, microbatches, PartitionSpec()),
        LOOP: by_hand(differentiated, microbatches, PartitionSpec("stage")),
    } | {name: pipelined(name, microbatches) for name in FAMILIES}
    expected = float(rows[PLAIN].step(*rows[PLAIN].args)[0])
    for name, row in rows.items():
        value = float(jax.tree.leaves(row.step(*row.args))[0])
        assert abs(value / expected - 1) < 1e-5, f"{name}: {value}, not {expected}"
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
    for _ in range(steps):
        for name, row in rows.items():
            times[name].append(row.run())
    least, least_cpu = (min(each) / S for each in zip(*times[PLAIN], strict=True))
    print(
        f"{'row':<29}{'ms':>6}{'of the least':>14}{'CPU':>6}{'temp MB':>9}{'compile s':>11}  bubble"
    )
    for name, row in rows.items():
        seconds, cpu = (min(each) for each in zip(*times[name], strict=True))
        temporaries = row.step.memory_analysis().temp_size_in_bytes / 1e6
        print(
            f"{name:<29}{seconds * 1e3:>6.0f}{seconds / least:>14.2f}{cpu / least_cpu:>6.2f}"
            f"{temporaries:>9.1f}{row.seconds:>11.1f}{row.bubble:>8}"
        )


def compile_times() -> None:
    """Prints seconds to compile and lines of the program, by microbatches and so by ticks."""
    print(f"{'schedule':<18}{'M':>4}{'compile s':>11}{'lines':>8}")
    for name in ("1f1b", "interleaved_1f1b", "zbv"):
        for count in (8, 8, 16, 32, 64):  # the first one warms up
            row = pipelined(name, count)
            lines = row.step.as_text().count("\n")
            print(f"{name:<18}{count:>4}{row.seconds:>11.1f}{lines:>8}")


def main() -> None:
    parser = argparse.ArgumentParser(description="schedules in one program, on emulated devices")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of every row")
    parser.add_argument("--compile", action="store_true", help="only compile, for 8 to 64")
    args = parser.parse_args()
    compile_times() if args.compile else step_times(args.steps)


if __name__ == "__main__":
    main()
