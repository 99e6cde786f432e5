"""A circular pipeline that sends results in parts computes what the user's plain program does."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

import jaxpipe as jp
from jaxpipe.ir.transforms import _in_parts

DIM, TOKENS = 8, 16


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1) * scale


def layer(w, x, batch, key):
    # Small scores: with large ones plain float32 would be off by 4e-5 from float64.
    scores = jnp.einsum("bte,bse->bts", norm(x, w["scale"]) @ w["query"], norm(x, w["scale"])) / DIM
    attention = jax.nn.softmax(scores - batch["mask"])
    x = x + jnp.einsum("bts,bse->bte", attention, norm(x, w["scale"])) @ w["out"]
    y = norm(jax.nn.silu(x @ w["up"]) @ w["down"] + w["bias"], w["scale"])
    return x + jnp.where(jax.random.bernoulli(key, 0.9, y.shape), y, 0)


def make(num_layers):
    keys = jax.random.split(jax.random.key(0), 8)
    names = ("query", "out", "up", "down")
    layers = {
        name: 0.3 * jax.random.normal(key, (num_layers, DIM, DIM))
        for name, key in zip(names, keys, strict=False)
    }
    layers |= {"bias": jnp.zeros((num_layers, DIM)), "scale": jnp.ones((num_layers, DIM))}
    params = {
        "embed": jax.random.normal(keys[4], (DIM, DIM)),
        "layers": layers,
        "head": jax.random.normal(keys[5], (DIM,)),
    }
    batch = {
        "x": jax.random.normal(keys[6], (24, TOKENS, DIM)),
        "mask": jax.random.normal(keys[7], (24, TOKENS, TOKENS)),
    }
    model = jp.Model(
        embed=lambda w, batch: batch["x"] @ w,
        layer=layer,
        loss=lambda w, x, batch: jnp.mean(jnp.square(x @ w - batch["mask"][..., 0])),
    )
    return model, params, batch


def permutes(jaxpr):
    """Returns the shapes that every permute of a jaxpr sends, outside of conditions."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "ppermute":
            yield eqn.outvars[0].aval.shape
        if eqn.primitive.name != "cond":
            for inner in jaxprs_in_params(eqn.params):
                yield from permutes(inner)


@pytest.mark.parametrize(
    ("ranks", "fsdp", "chunks", "gather", "remat"),
    [
        (2, 2, 4, "tick", None),
        (2, 2, 2, "repeat", "full"),
        (3, 1, 2, "once", None),
        (4, 2, 2, "repeat", None),
        (8, 1, 1, "tick", "full"),
    ],
)
def test_loss_and_gradients_are_those_of_the_plain_program(
    monkeypatch, ranks, fsdp, chunks, gather, remat
):
    monkeypatch.setattr(_in_parts, "_LEAST_BYTES", 0)
    model, params, batch = make(ranks * chunks)
    mesh = jax.make_mesh((ranks, fsdp), ("stage", "fsdp"), devices=jax.devices()[: ranks * fsdp])
    pipe = jp.pipeline(
        model,
        schedule="circular",
        mesh=mesh,
        microbatches=ranks,
        chunks=chunks,
        gather=gather,
        remat=remat,
    )
    stored = pipe.shard(params)
    key = jax.random.key(1)
    jaxpr = jax.make_jaxpr(pipe.value_and_grad)(stored, batch, key).jaxpr
    sent = {shape[-2] for shape in permutes(jaxpr) if len(shape) > 2}
    assert sent == {TOKENS, *(TOKENS // share for share in (2, 4, 8))}, "the backward sends all"
    pipe.check(params, batch, key)
