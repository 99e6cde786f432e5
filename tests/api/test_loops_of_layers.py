"""Layers whose loops and branches have constants, as recurrences begin with zeros."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxpipe as jp
from harness.contract import assert_close

D, B, T, L = 8, 8, 6, 4


def recurrence(w, x):
    def step(state, x_t):
        total, steps, last = state
        total = jnp.tanh(total + x_t @ w)
        # `last` varies only from the second iteration on.
        return (total, steps + 1, last + 0.1 * total), total + 0.1 * last

    start = jnp.zeros((x.shape[0], D)), 0, jnp.zeros((x.shape[0], D))
    return jnp.moveaxis(lax.scan(step, start, jnp.moveaxis(x, 1, 0))[1], 0, 1)


def powers(w, x):
    def body(i, sums):
        total, power = sums
        return total + power / (i + 1), power @ w

    total, _ = lax.fori_loop(0, 3, body, (jnp.zeros_like(x), x))
    return total


def newton(x):
    """Ends after a number of iterations that depends on no row."""

    def body(state):
        i, root, _ = state
        return i + 1, 0.5 * (root + (1 + x**2) / root), jnp.zeros(())

    start = 0, jnp.ones(x.shape, x.dtype), jnp.ones(())
    return lax.stop_gradient(lax.while_loop(lambda state: state[0] < 8, body, start)[1])


def chosen(w, x, batch):
    def scaled(x):
        return x * w[0, 0], 1

    def nothing(x):
        return jnp.zeros(x.shape, x.dtype), 0

    branches = [nothing, scaled, lambda x: (x, 2)]
    y, _ = lax.cond(batch["scale"][0, 0] > -1, scaled, nothing, x)
    return y + lax.switch(batch["branch"][0, 0], branches, x)[0]


def layer(w, x, batch):
    x = x + recurrence(w["recurrence"], x)
    x = x + powers(w["powers"], x) / newton(x)
    return x + chosen(w["chosen"], x, batch)


def drawn() -> tuple[Any, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 99))

    def matrix(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / math.sqrt(shape[0]) / 2

    names = ("recurrence", "powers", "chosen")
    layers = [{name: matrix(D, D) for name in names} for _ in range(L)]
    params = {"embed": matrix(D, D), "layers": layers, "head": matrix(D, D)}
    batch = {
        "x": matrix(B, T, D) * 4,
        "scale": jnp.ones((B, 1)),
        "branch": jnp.full((B, 1), 2),
    }
    return params, batch


def loss(w, x, batch):
    return jnp.mean((x @ w) ** 2)


def plain_loss(params, batch):
    x = batch["x"] @ params["embed"]
    for w in params["layers"]:
        x = layer(w, x, batch)
    return loss(params["head"], x, batch)


@pytest.mark.parametrize(
    ("schedule", "axes"),
    [
        pytest.param("circular", {"stage": 2}, marks=pytest.mark.slow),
        ("1f1b", {"stage": 2, "fsdp": 2}),
        pytest.param("circular", {"stage": 2, "fsdp": 2}, marks=pytest.mark.slow),
        pytest.param("zbv", {"stage": 2}, marks=pytest.mark.slow),
        pytest.param(None, {"stage": 1, "fsdp": 2}, marks=pytest.mark.slow),
    ],
)
def test_loops_may_begin_with_constants(float64: None, schedule: Any, axes: dict[str, int]):
    del float64
    params, batch = drawn()
    model = jp.Model(lambda w, batch: batch["x"] @ w, layer, loss)
    mesh = jp.make_mesh(axes, devices=jax.devices()[: math.prod(axes.values())])
    pipe = jp.pipeline(
        model, schedule=schedule, mesh=mesh, microbatches=2, row_wise={"layer": True}
    )
    true, true_grads = jax.jit(jax.value_and_grad(plain_loss))(params, batch)
    (value, _), grads = pipe.jit(pipe.value_and_grad)(pipe.shard(params), batch)
    assert_close(float(value), true, "loss")
    for a, b in zip(jax.tree.leaves(pipe.unshard(grads)), jax.tree.leaves(true_grads), strict=True):
        assert abs(a - b).max() <= 1e-12 * abs(b).max()
