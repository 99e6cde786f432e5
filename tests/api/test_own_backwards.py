"""Backwards that are no linear functions, as of clipped gradients, are those of microbatches.

The judge is the user's program of each microbatch, differentiated by JAX, without the project.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp

B, D, M = 16, 8, 4


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return x


@jax.custom_vjp
def moved(x: Any) -> Any:
    return x


@jax.custom_vjp
def scaled(x: Any) -> Any:
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))
# Of zeros this is no zero, but no number.
scaled.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.max(jnp.abs(g)),))
moved.defvjp(lambda x: (x, None), lambda _, g: (g + 0.01,))


def embed(w: Any, batch: Any) -> Any:
    return batch["x"] @ w


def layer(w: Any, x: Any, batch: Any) -> Any:
    return x + jnp.tanh(x @ w)


def loss(w: Any, x: Any, batch: Any) -> Any:
    return jnp.mean((x @ w - batch["y"]) ** 2)


def centred(x: Any) -> Any:
    return x - x.mean(axis=0)


MODELS: dict[str, tuple[Callable, Callable, Callable]] = {
    "a weight of a layer": (embed, lambda w, x, batch: layer(clipped(w), x, batch), loss),
    "rows that are then mixed": (
        embed,
        lambda w, x, batch: x + jnp.tanh(centred(clipped(x)) @ w),
        loss,
    ),
    "by the largest of all rows": (
        embed,
        lambda w, x, batch: x + scaled(jnp.tanh(x @ scaled(w))),
        loss,
    ),
    "not zero for zeros": (embed, lambda w, x, batch: moved(layer(moved(w), x, batch)), loss),
    "a weight of the embedding": (lambda w, batch: embed(clipped(w), batch), layer, loss),
    "rows of the embedding": (lambda w, batch: centred(clipped(embed(w, batch))), layer, loss),
    "the head": (embed, layer, lambda w, x, batch: loss(clipped(w), x, batch)),
    "the loss of mixed rows": (
        embed,
        layer,
        lambda w, x, batch: jnp.log(jnp.sum(jnp.square(clipped(centred(x)) @ w - batch["y"]))),
    ),
}
ROWS = {
    "1f1b, fsdp": ({"stage": 2, "fsdp": 2}, {"schedule": "1f1b"}),
    "1f1b, data of 3": ({"stage": 2, "data": 3}, {"schedule": "1f1b"}),
    "circular": ({"stage": 2}, {"schedule": "circular"}),
    "circular, tensor": ({"stage": 2, "fsdp": 2, "tensor": 2}, {"schedule": "circular"}),
    "circular, two axes of rows": ({"stage": 2, "data": 2, "fsdp": 2}, {"schedule": "circular"}),
    "zero bubble": ({"stage": 2, "data": 2}, {"schedule": "zero_bubble_h1"}),
    "no pipeline": ({"stage": 1, "fsdp": 2}, {"schedule": None}),
    "mpmd": ({"stage": 2}, {"schedule": "1f1b", "engine": "mpmd"}),
}
# Each model with one pipeline that gives each device some rows, and each pipeline with one model.
FAST = {("1f1b, fsdp", name) for name in MODELS} | {
    ("circular", "a weight of the embedding"),
    *((row, "rows that are then mixed") for row in ("1f1b, data of 3", "circular, tensor")),
    ("circular, two axes of rows", "by the largest of all rows"),
    ("zero bubble", "by the largest of all rows"),
    *(("circular", name) for name in ("by the largest of all rows", "not zero for zeros")),
}


def params() -> Any:
    keys = jax.random.split(jax.random.key(0), 6)
    matrices = [jax.random.normal(key, (D, D)) / 4 for key in keys]
    return {"embed": matrices[0], "layers": matrices[1:5], "head": matrices[5][0]}


def batch(rows: int) -> Any:
    keys = jax.random.split(jax.random.key(1))
    return {"x": jax.random.normal(keys[0], (rows, D)), "y": jax.random.normal(keys[1], (rows,))}


def assert_close(got: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.max(np.abs(a - b)) <= 1e-5 * np.max(np.abs(b))


def mean_of_microbatches(functions: tuple[Callable, Callable, Callable]) -> Callable:
    embed, layer, loss = functions

    def plain(params: Any, batch: Any) -> Any:
        losses = []
        for piece in zip(*(jnp.split(batch[name], M) for name in ("x", "y")), strict=True):
            own = dict(zip(("x", "y"), piece, strict=True))
            x = embed(params["embed"], own)
            for w in params["layers"]:
                x = layer(w, x, own)
            losses.append(loss(params["head"], x, own))
        return sum(losses) / M

    return plain


@pytest.mark.parametrize(
    ("row", "name"),
    [
        pytest.param(row, name, marks=() if (row, name) in FAST else pytest.mark.slow)
        for row in ROWS
        for name in MODELS
    ],
)
def test_a_backward_is_given_the_cotangents_of_a_whole_microbatch(row: str, name: str):
    sizes, options = ROWS[row]
    rows = 24 if "data of 3" in row else B
    mesh = jp.make_mesh(sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    pipe = jp.pipeline(jp.Model(*MODELS[name]), mesh=mesh, microbatches=M, **options)
    (value, _), grads = pipe.jit(pipe.value_and_grad)(pipe.shard(params()), batch(rows))
    wanted = jax.value_and_grad(mean_of_microbatches(MODELS[name]))(params(), batch(rows))
    assert_close((np.asarray(value), pipe.unshard(grads)), wanted)


@pytest.mark.parametrize("gather", ["tick", "layer"])
def test_second_derivatives_of_a_circular_pipeline_are_those_of_its_value(gather: str):
    functions = embed, layer, loss
    sizes = {"stage": 2, "fsdp": 2}
    options: dict[str, Any] = {"schedule": "circular", "gather": gather}
    mesh = jp.make_mesh(sizes, devices=jax.devices()[:4])
    pipe = jp.pipeline(jp.Model(*functions), mesh=mesh, microbatches=M, **options)
    stored, data = pipe.shard(params()), batch(B)

    def squares(tree: Any) -> Any:
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))

    with pytest.raises(ValueError, match=r"such as a gradient penalty, differentiate `pipe.value`"):
        jax.grad(lambda params: squares(pipe.value_and_grad(params, data)[1]))(stored)

    def penalty(value: Callable) -> Callable:
        return lambda params: squares(jax.grad(value)(params, data))

    got = jax.jit(jax.grad(penalty(lambda params, data: pipe.value(params, data)[0])))(stored)
    wanted = jax.grad(penalty(mean_of_microbatches(functions)))(params())
    assert_close(pipe.unshard(got), wanted)
