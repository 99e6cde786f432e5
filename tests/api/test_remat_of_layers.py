"""Layers that are computed again are, also where no loop keeps forward and backward apart."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxpipe as jp

D, L = 16, 4


def layer(w: Any, x: jax.Array, batch: Any) -> jax.Array:
    return x + jnp.tanh(x @ w)


def other(w: Any, x: jax.Array, batch: Any) -> jax.Array:
    return x + jnp.sin(x @ w)


def loss(w: Any, x: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean(jnp.square(x @ w))


def products(layers: Any, weights: Any, layer_remat: str, order: Any, scan: Any) -> int:
    """Returns the matrix products of the compiled loss and gradients."""
    model = jp.Model(lambda w, batch: batch["x"] * w, layer=layers, loss=loss, order=order)
    mesh = jp.make_mesh({"stage": 1}, devices=jax.devices()[:1])
    how: dict[str, Any] = {"layer_remat": layer_remat, "scan_layers": scan}
    pipe = jp.pipeline(model, schedule=None, mesh=mesh, microbatches=1, **how)
    params = {"embed": jnp.ones(D), "layers": weights, "head": jnp.ones((D, D))}
    step = pipe.jit(pipe.value_and_grad)
    compiled = step.lower(pipe.shard(params), {"x": jnp.ones((8, 4, D))}).compile()
    return compiled.as_text().count(" dot(")


ALL = jnp.ones((L, D, D))
KINDS = {"one": layer, "other": other}


@pytest.mark.parametrize(
    ("layers", "weights", "order", "scan"),
    [
        pytest.param(layer, ALL, None, False, id="no loop"),
        pytest.param(layer, ALL[:1], None, None, id="one layer"),
        pytest.param(KINDS, list(ALL), ("one", "other") * 2, None, id="kinds that alternate"),
    ],
)
def test_a_layer_without_a_loop_is_computed_again(layers: Any, weights: Any, order: Any, scan: Any):
    """XLA would merge what is computed again with the forward."""
    kept = products(layers, weights, "none", order, scan)
    assert products(layers, weights, "full", order, scan) == kept + len(weights)
