"""Every engine on one GPU beside the plain program on it, in float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxpipe as jp

LAYERS, WIDTH, ROWS, TOKENS = 4, 32, 8, 16
ENGINES: dict[str, dict[str, Any]] = {
    "unpipelined": {"schedule": None},
    "circular": {"schedule": "circular"},
    "circular, repeats": {"schedule": "circular", "chunks": 2},
    "1f1b": {"schedule": "1f1b", "engine": "scheduled"},
    "zero bubble": {"schedule": "zero_bubble_h1", "engine": "scheduled"},
    "1f1b by mpmd": {"schedule": "1f1b", "engine": "mpmd"},
    "zero bubble by mpmd": {"schedule": "zero_bubble_h1", "engine": "mpmd"},
}
REMAT = [None, "full", "minimal_offloaded"]


@pytest.fixture(autouse=True)
def all_bits():
    """Without it GPUs multiply float32 in TF32, which has 10 bits."""
    with jax.default_matmul_precision("highest"):
        yield


def layer(w, x, batch):
    q, k, v = (checkpoint_name(x @ w[name], f"{name}_proj") for name in ("query", "key", "value"))
    scores = jnp.where(jnp.tri(TOKENS, dtype=bool), q @ k.mT / WIDTH**0.5, -jnp.inf)
    x = x + jax.nn.softmax(scores) @ v
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def embed(w, batch):
    return w[batch["tokens"]]


def loss(w, x, batch):
    logits = x @ w
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"]).mean()


def plain(params, batch):
    x = embed(params["embed"], batch)
    for w in params["layers"]:
        x = layer(w, x, batch)
    return loss(params["head"], x, batch)


def make_params_and_batch() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return (rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)

    names = {"query": WIDTH, "key": WIDTH, "value": WIDTH, "up": 4 * WIDTH}
    layers = [
        {n: normal(WIDTH, width) for n, width in names.items()} | {"down": normal(4 * WIDTH, WIDTH)}
        for _ in range(LAYERS)
    ]
    params = {"embed": normal(64, WIDTH), "layers": layers, "head": normal(WIDTH, 64)}
    return params, {"tokens": rng.integers(0, 64, (ROWS, TOKENS)).astype(np.int32)}


@pytest.mark.parametrize("remat", REMAT, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_three_steps_are_those_of_the_plain_program(engine: str, remat: str | None):
    params, batch = make_params_and_batch()
    mesh = jax.make_mesh((1,), ("stage",), devices=jax.devices()[:1])
    model = jp.Model(embed=embed, layer=layer, loss=loss)
    how: dict[str, Any] = (
        {} if remat is None else {"layer_remat" if remat != "full" else "remat": remat}
    )
    pipe = jp.pipeline(model, mesh=mesh, microbatches=4, **ENGINES[engine], **how)

    def steps(tx: Any, value_and_grad: Any, params: Any, unshard: Any) -> list[Any]:
        @jax.jit if unshard is None else pipe.jit
        def step(params, state):
            value, grads = value_and_grad(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value, grads

        state, results = tx.init(params), []
        for _ in range(3):
            params, state, value, grads = step(params, state)
            trees = (params, grads) if unshard is None else map(unshard, (params, grads))
            results.append((float(value), *map(jax.device_get, trees)))
        return results

    tx = optax.sgd(0.01, momentum=0.9)
    theirs = steps(tx, lambda p: jax.value_and_grad(plain)(p, batch), params, None)

    def ours_of(params: Any) -> Any:
        (value, _), grads = pipe.value_and_grad(params, batch)
        return value, grads

    ours = steps(pipe.optimizer(tx), ours_of, pipe.shard(params), pipe.unshard)
    for ours_now, theirs_now in zip(ours, theirs, strict=True):
        for x, true in zip(*map(jax.tree.leaves, (ours_now, theirs_now)), strict=True):
            assert np.abs(np.asarray(x) - true).max() <= 1e-5 * np.abs(true).max()
