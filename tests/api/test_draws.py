"""Random numbers by keys other than that of dropout, and weights of losses that are drawn."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxpipe as jp

M, ROWS, DIM = 2, 4, 8
BATCH = {
    "x": jax.random.normal(jax.random.key(1), (M * ROWS, 4, DIM)),
    "y": jax.random.normal(jax.random.key(2), (M * ROWS, 4)),
}
RUNS = [("circular", "auto"), ("1f1b", "auto"), ("1f1b", "mpmd"), (None, "auto")]


def embed(w, batch):
    return batch["x"] * w


def loss(w, x, batch):
    return jnp.mean((x @ w - batch["y"]) ** 2)


def by_constant(w, x, batch):
    return x + jnp.tanh(x @ w["w"]) * jax.random.normal(jax.random.key(7), x.shape)


def by_leaf(w, x, batch):
    return x + jnp.tanh(x @ w["w"]) * jax.random.normal(w["key"], x.shape)


def params(layers: list[Any]) -> dict[str, Any]:
    head = jax.random.normal(jax.random.key(3), (DIM,))
    return {"embed": jnp.ones(DIM), "layers": layers, "head": head}


def weights(i: int) -> jax.Array:
    return jax.random.normal(jax.random.key(i), (DIM, DIM)) / 3


def pipeline(model: jp.Model, schedule: str | None, engine: str, **options: Any) -> Any:
    sizes = {"stage": 1 if schedule is None else 2, "fsdp": 2}
    mesh = jp.make_mesh(sizes, devices=jax.devices()[: 2 * sizes["stage"]])
    options |= {"schedule": schedule, "engine": engine, "microbatches": M}
    return jp.pipeline(model, mesh=mesh, **options)


@pytest.mark.parametrize("layer", [by_constant, by_leaf])
@pytest.mark.parametrize(("schedule", "engine"), RUNS)
def test_draws_by_other_keys_are_those_of_whole_microbatches(layer, schedule, engine):
    leaves = [{"w": weights(i)} for i in range(2)]
    if layer is by_leaf:
        leaves = [w | {"key": jax.random.key(i)} for i, w in enumerate(leaves)]
    tree = params(leaves)

    def plain(tree):
        total = 0.0
        for m in range(M):
            piece = jax.tree.map(lambda x, m=m: x[ROWS * m : ROWS * (m + 1)], BATCH)
            x = embed(tree["embed"], piece)
            for w in tree["layers"]:
                x = layer(w, x, piece)
            total += loss(tree["head"], x, piece) / M
        return total

    is_key = {"frozen": lambda path, leaf: "key" in path} if layer is by_leaf else {}
    pipe = pipeline(jp.Model(embed, layer, loss), schedule, engine, **is_key)
    value, _ = pipe.jit(pipe.value)(pipe.shard(tree), BATCH)
    assert float(value) == pytest.approx(float(plain(tree)), rel=1e-5)


@pytest.mark.parametrize(("schedule", "engine"), RUNS)
def test_a_weight_that_the_dropout_key_draws_is_that_of_whole_microbatches(schedule, engine):
    def masked(w, x, batch, key):
        error = (x @ w - batch["y"]) ** 2
        mask = jax.random.bernoulli(key, 0.3, error.shape).astype(error.dtype)
        return jp.Weighted(jnp.sum(error * mask), jnp.sum(mask))

    def layer(w, x, batch):
        return x + jnp.tanh(x @ w)

    key, tree = jax.random.key(11), params([weights(0), weights(1)])

    def plain(tree):  # keys as docs/explanation/exactness.md has them
        total, weight = 0.0, 0.0
        for m in range(M):
            piece = jax.tree.map(lambda x, m=m: x[ROWS * m : ROWS * (m + 1)], BATCH)
            x = embed(tree["embed"], piece)
            for w in tree["layers"]:
                x = layer(w, x, piece)
            own = key
            for index in (0, m, 1):
                own = jax.random.fold_in(own, index)
            part = masked(tree["head"], x, piece, own)
            total, weight = total + part.total, weight + part.weight
        return total / weight

    pipe = pipeline(jp.Model(embed, layer, masked), schedule, engine)
    (value, _), grads = pipe.jit(pipe.value_and_grad)(pipe.shard(tree), BATCH, key)
    true, true_grads = jax.value_and_grad(plain)(tree)
    assert float(value) == pytest.approx(float(true), rel=1e-5)
    for a, b in zip(jax.tree.leaves(pipe.unshard(grads)), jax.tree.leaves(true_grads), strict=True):
        assert jnp.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gather", ["tick", "once", "repeat", "layer"])
def test_jax_differentiates_the_value_of_a_circular_pipeline(gather):
    def layer(w, x, batch):
        return x + jnp.tanh(x @ w)

    tree = params([weights(i) for i in range(4)])

    def plain(tree):
        x = embed(tree["embed"], BATCH)
        for w in tree["layers"]:
            x = layer(w, x, BATCH)
        return loss(tree["head"], x, BATCH)

    pipe = pipeline(jp.Model(embed, layer, loss), "circular", "auto", gather=gather)
    stored = pipe.shard(tree)
    grads = pipe.unshard(pipe.jit(jax.grad(lambda p: pipe.value(p, BATCH)[0]))(stored))
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(jax.grad(plain)(tree)), strict=True):
        assert jnp.allclose(a, b, rtol=1e-5, atol=1e-6)
