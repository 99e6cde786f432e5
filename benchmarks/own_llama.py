"""llama2-7b of a user's own functions beside the trainer's, as the TPU's compiler reports them.

    pip install "jaxpipe[train,aot]"
    python benchmarks/own_llama.py [--dump-hlo DIR] [row ...]

Compiles one training step of `jaxpipe.pipeline` and of `jaxpipe train` with the same options for a
v5p-8 that is not there: some minutes a row on two cores. `busy` and `exposed` are those of
benchmarks/tpu_memory.py.
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import PyTree
from tpu_memory import COMMON, TWO_RANKS, ZERO_1, compile_row, without_kernels

import jaxpipe as jp
from jaxpipe.autodiff import remat_by_name
from jaxpipe.models.layers import rope_by_product, rope_frequencies
from jaxpipe.xla import compile_only_devices, memory

L, D, H, C, F, V = 32, 4096, 32, 128, 11008, 32000  # layers, embed, heads, channels, MLP, vocab
B, T = 48, 2048  # sequences, tokens
TOPOLOGY = "v5p:2x2x1"


class Row(NamedTuple):
    """The same step in the terms of `jp.pipeline` and of the trainer."""

    mesh: dict[str, int]
    options: dict[str, Any]
    keys: dict[str, Any]


FSDP = {"stage": 2, "fsdp": 2}
DELAYED = {"forwarding_delay": True, "vocab_parallel": True}
DELAYED_KEYS = TWO_RANKS | {
    "pipeline_delay_activation_forwarding": True,
    "pipeline_vocab_parallel": True,
}
ROWS = {
    "C": Row(FSDP, {}, TWO_RANKS),
    "layer, delay, host": Row(
        FSDP,
        DELAYED
        | {"gather": "layer", "remat": remat_by_name("custom", {"decoder_layer_input": "offload"})},
        DELAYED_KEYS
        | {"pipeline_fsdp_ag_per_layer": True, "remat_policy": "custom"}
        | {"decoder_layer_input": "offload"},
    ),
    "once, delay, ZeRO-1": Row(
        {"data": 2, "stage": 2},
        DELAYED | {"gather": "once", "zero1": True},
        DELAYED_KEYS | {"pipeline_fsdp_ag_once": True} | ZERO_1,
    ),
}


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    x32 *= jax.lax.rsqrt(jnp.mean(x32**2, axis=-1, keepdims=True) + 1e-5)
    return (x32 * scale).astype(x.dtype)


def rotate(x: jax.Array) -> jax.Array:
    """Rotates the channels of [b, T, H, C] by position."""
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    return rope_by_product(x, positions, rope_frequencies(C, 10_000.0))


def embed(table: jax.Array, batch: PyTree) -> jax.Array:
    return table[batch["tokens"]]


def layer(w: PyTree, x: jax.Array, batch: PyTree) -> jax.Array:
    x = checkpoint_name(x, "decoder_layer_input")
    h = rms_norm(x, w["norm"])
    q, k, v = (jnp.einsum("btd,dhc->bthc", h, w[name]) for name in "qkv")
    x += jnp.einsum("bthc,hcd->btd", jp.attention(rotate(q), rotate(k), v), w["out"])
    h = rms_norm(x, w["mlp_norm"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def loss(w: PyTree, x: jax.Array, batch: PyTree) -> jax.Array:
    logits = jnp.dot(rms_norm(x, w["norm"]), w["logits"], preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def vocab_parallel_loss(w: PyTree, x: jax.Array, batch: PyTree, axis: str) -> jax.Array:
    h = rms_norm(x, w["norm"])
    return jp.vocab_parallel_cross_entropy(h, w["logits"], batch["targets"], axis).mean()


def shapes() -> tuple[PyTree, PyTree]:
    """Returns the shapes of parameters and of a batch."""
    array = jax.ShapeDtypeStruct
    layers = dict.fromkeys("qkv", (D, H, C)) | {"out": (H, C, D), "down": (F, D)}
    layers |= {"gate": (D, F), "up": (D, F), "norm": (D,), "mlp_norm": (D,)}
    params = {
        "embed": array((V, D), jnp.float32),
        "layers": {name: array((L, *shape), jnp.float32) for name, shape in layers.items()},
        "head": {"norm": array((D,), jnp.float32), "logits": array((D, V), jnp.float32)},
    }
    return params, {name: array((B, T), jnp.int32) for name in ("tokens", "targets")}


def compile_own(row: Row) -> Any:
    """Compiles a training step of the functions above."""
    mesh = jp.make_mesh(row.mesh, devices=compile_only_devices(TOPOLOGY))
    model = jp.Model(embed, layer, loss, vocab_parallel_loss=vocab_parallel_loss)
    options = {"compute_dtype": jnp.bfloat16, **row.options}
    pipe = jp.pipeline(model, schedule="circular", mesh=mesh, microbatches=8, chunks=16, **options)
    tx = pipe.optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4)))

    @partial(pipe.jit, donate_argnums=(0, 1))
    def train_step(params, state, batch):
        value, grads = pipe.value_and_grad(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params, batch = shapes()
    params = pipe.shapes(params)
    return train_step.lower(params, tx.init(params), batch).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description="llama2-7b of a user beside the trainer's")
    parser.add_argument("rows", nargs="*", default=[*ROWS], help=f"of {', '.join(ROWS)}")
    parser.add_argument("--dump-hlo", type=Path, metavar="DIR", help="keep the programs in DIR")
    args = parser.parse_args()
    print(f"{'row':<22}{'whose':>8}{'peak MB':>9}{'busy':>8}{'exposed':>9}{'step s':>8}")
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.rows:
            row, folder = ROWS[name], args.dump_hlo or Path(temporary)
            compiled = compile_own(row)
            program = folder / f"own-{name}.hlo".replace(" ", "-")
            program.parent.mkdir(parents=True, exist_ok=True)
            program.write_text(compiled.as_text(), encoding="utf-8")
            report, theirs = compile_row(COMMON | row.keys, folder / f"trainer-{name}")
            peak = memory(compiled, "tpu").peak_bytes
            ours = without_kernels(program, report["platform"])
            for whose, size, time in (
                ("own", peak, ours),
                ("trainer", report["memory"]["peak_bytes"], theirs),
            ):
                step = time.busy + time.exposed
                print(
                    f"{name:<22}{whose:>8}{size / 1e6:>9.0f}{time.busy:>8.3f}{time.exposed:>9.3f}"
                    f"{step:>8.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
