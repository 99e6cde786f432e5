"""Leaves of every type: integers, booleans, random keys, size 0, bfloat16; and dropout keys."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe import autodiff

D, L, B = 4, 4, 16
ROWS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "unpipelined": (None, {}),
    "circular": ("circular", {}),
    "scheduled": ("zero_bubble_h1", {}),
    "mpmd": ("1f1b", {"engine": "mpmd"}),
}


def params(extra: Callable[[int], Any] | None = None) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), L + 2)
    layers: list[Any] = [{"w": jax.random.normal(key, (D, D)) / D} for key in keys[2:]]
    if extra is not None:
        layers = [layer | {"extra": extra(i)} for i, layer in enumerate(layers)]
    head = jax.random.normal(keys[1], (D,))
    return {"embed": jax.random.normal(keys[0], (D, D)), "layers": layers, "head": head}


def batch() -> dict[str, jax.Array]:
    return {"x": jax.random.normal(jax.random.key(1), (B, D)), "y": jnp.arange(float(B))}


def embed(w: Any, batch: Any) -> Any:
    return batch["x"] @ w


def layer(w: Any, x: Any, batch: Any) -> Any:
    return x + jnp.tanh(x @ w["w"])


def loss(w: Any, x: Any, batch: Any) -> Any:
    return jnp.mean((x @ w - batch["y"]) ** 2)


def pipeline(model: Any, row: str, microbatches: int = 4, **options: Any) -> Any:
    schedule, more = ROWS[row]
    sizes = {"stage": 2} | {name: options.pop(name, 1) for name in ("data", "fsdp")}
    mesh = jp.make_mesh(sizes, devices=jax.devices()[: 2 * sizes["data"] * sizes["fsdp"]])
    options = {"schedule": schedule, "mesh": mesh, "microbatches": microbatches} | more | options
    return jp.pipeline(model, **options)


def run(pipe: Any, params: Any, batch: Any, key: Any = None) -> Any:
    step = pipe.jit(lambda params, batch: pipe.value_and_grad(params, batch, key))
    (value, _), grads = step(pipe.shard(params), batch)
    return float(value), pipe.unshard(grads)


def close(got: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.abs(a - b).max(initial=0) <= 1e-5 * np.abs(b).max(initial=0)


EXTRAS: dict[str, tuple[Callable[[int], Any], Callable[[Any, Any], Any]]] = {
    "integer": (lambda i: jnp.int32(i + 1), lambda e, y: y * e.astype(jnp.float32)),
    "boolean": (lambda i: jnp.array(i % 2 == 0), lambda e, y: jnp.where(e, y, -y)),
    "key": (lambda i: jax.random.key(i), lambda e, y: y * jax.random.normal(e)),
    "keys": (
        lambda i: jax.random.split(jax.random.key(i), 4),
        lambda e, y: y * jax.random.normal(e[2]),
    ),
    "raw key": (
        lambda i: jax.random.PRNGKey(i),
        lambda e, y: y * jax.random.normal(jax.random.wrap_key_data(e)),
    ),
}


@pytest.mark.parametrize("name", EXTRAS)
@pytest.mark.parametrize("row", ROWS)
def test_a_frozen_leaf_that_is_no_float_is_read_as_it_is(row: str, name: str):
    """Of a key too: the index of the microbatch is folded into dropout keys alone."""
    extra, use = EXTRAS[name]

    def reading(w: Any, x: Any, batch: Any) -> Any:
        return x + use(w["extra"], jnp.tanh(x @ w["w"]))

    def plain(trained: Any, whole: Any) -> Any:
        x = embed(trained["embed"], batch())
        for w, all_of_layer in zip(trained["layers"], whole["layers"], strict=True):
            x = reading(all_of_layer | w, x, batch())
        return loss(trained["head"], x, batch())

    whole = params(extra)
    trained = whole | {"layers": [{"w": w["w"]} for w in whole["layers"]]}
    wanted, grads = jax.value_and_grad(plain)(trained, whole)
    uneven: dict[str, Any] = (
        {} if row in ("circular", "unpipelined") else {"layers_per_stage": (3, 1)}
    )
    for options in ({"fsdp": 2}, uneven):
        pipe = pipeline(
            jp.Model(embed, reading, loss),
            row,
            frozen=lambda path, leaf: not jnp.issubdtype(leaf.dtype, jnp.inexact),
            **options,
        )
        value, found = run(pipe, whole, batch())
        assert abs(value - wanted) <= 1e-5 * wanted
        close(found, grads)  # None at frozen leaves, so as many leaves


@pytest.mark.parametrize("name", EXTRAS)
@pytest.mark.parametrize("row", ROWS)
def test_a_trainable_leaf_that_is_no_float_is_refused_by_name(row: str, name: str):
    extra, _ = EXTRAS[name]
    pipe = pipeline(jp.Model(embed, layer, loss), row)
    match = r"`params\['layers'\]\[0\]\['extra'\]` is .*no gradient. Say .*frozen=lambda path, leaf"
    for f in (pipe.shard, lambda params: pipe.init(lambda: params)):
        with pytest.raises(ValueError, match=match):
            f(params(extra))


@pytest.mark.parametrize("row", ROWS)
def test_a_leaf_of_size_0_is_trained_as_any_other(row: str):
    def adding(w: Any, x: Any, batch: Any) -> Any:
        return layer(w, x, batch) + jnp.sum(w["extra"])

    whole = params(lambda i: jnp.zeros((0, 3)))
    found = run(pipeline(jp.Model(embed, adding, loss), row, fsdp=2), whole, batch())
    wanted = run(pipeline(jp.Model(embed, layer, loss), "unpipelined"), params(), batch())
    close(found[0], wanted[0])
    assert [w["extra"].shape for w in found[1]["layers"]] == [(0, 3)] * L
    close([w["w"] for w in found[1]["layers"]], [w["w"] for w in wanted[1]["layers"]])


@pytest.mark.parametrize("row", ["unpipelined", "circular", "scheduled"])
def test_leaves_and_metrics_of_size_0_may_be_divided_over_data(row: str):
    def adding(w: Any, x: Any, batch: Any) -> Any:
        return layer(w, x, batch) + jnp.sum(w["extra"])

    def with_empty(w: Any, x: Any, batch: Any) -> Any:
        return loss(w, x, batch), {"empty": x[:, :0]}

    whole = params(lambda i: jnp.zeros((0,)))
    pipe = pipeline(jp.Model(embed, adding, with_empty), row, 2, data=2, zero1=True)
    rows = batch() | {"empty": jnp.zeros((B, 0))}
    pipe.check(whole, rows)
    _, metrics = pipe.jit(pipe.value)(pipe.shard(whole), rows)
    assert metrics["empty"].shape == (B, 0)


@pytest.mark.parametrize("row", ROWS)
def test_a_batch_with_a_leaf_of_size_0_may_be_accumulated(row: str):
    pipe = pipeline(jp.Model(embed, layer, loss), row, 2, accumulate=2)
    rows = batch() | {"empty": jnp.zeros((B, 0))}
    assert pipe.check(params(), rows).largest <= 1e-5


@pytest.mark.parametrize("remat", [autodiff.recompute, autodiff.keep])
@pytest.mark.parametrize("row", ROWS)
def test_a_random_key_may_travel_with_x(row: str, remat: Any):
    def with_keys(w: Any, batch: Any) -> Any:
        return {"h": embed(w, batch), "key": jax.vmap(jax.random.key)(batch["seed"])}

    def noisy(w: Any, x: Any, batch: Any) -> Any:
        noise = jax.vmap(lambda key: jax.random.normal(key, (D,)))(x["key"])
        return x | {"h": x["h"] + jnp.tanh(x["h"] @ w["w"]) * noise}

    def loss_of_h(w: Any, x: Any, batch: Any) -> Any:
        return loss(w, x["h"], batch)

    def plain(params: Any) -> Any:
        x = with_keys(params["embed"], rows)
        for w in params["layers"]:
            x = noisy(w, x, rows)
        return loss_of_h(params["head"], x, rows)

    rows = batch() | {"seed": jnp.arange(B)}
    pipe = pipeline(jp.Model(with_keys, noisy, loss_of_h), row, remat=remat)
    wanted = jax.value_and_grad(plain)(params())
    close(run(pipe, params(), rows), wanted)


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("row", ROWS)
def test_gradients_of_bfloat16_parameters_are_summed_in_float32(row: str, tied: bool):
    """In bfloat16, 512 equal terms add up to 1/2 of their sum, and 1024 to 1/4."""
    count = 1024
    small = {"embed": jnp.ones(D), "layers": [jnp.full(D, 0.01)] * 2, "head": jnp.full(D, 0.5)}
    small = jax.tree.map(lambda x: x.astype(jnp.bfloat16), small)

    def mean(w: Any, x: Any, batch: Any) -> Any:
        out = w["head"] + w["embed"] if tied else w
        return jnp.mean(x * out).astype(jnp.float32)

    model = jp.Model(lambda w, b: b["x"] * w, lambda w, x, b: x + w, mean, tied=tied)
    rows = {"x": jnp.ones((count, D), jnp.bfloat16)}
    schedule = {} if row != "scheduled" else {"schedule": "1f1b"}
    _, many = run(pipeline(model, row, count, **schedule), small, rows)
    _, few = run(pipeline(model, row, 4, **schedule), small, rows)
    assert {x.dtype for x in jax.tree.leaves(many)} == {jnp.dtype(jnp.bfloat16)}
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(few), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.abs(a - b).max() <= 2**-7 * np.abs(b).max()


def test_shares_of_a_tied_bfloat16_gradient_are_sent_once_a_step():
    """A cast to float32 around their sum must not hide that it is one."""

    def transfers(dtype: Any) -> int:
        whole = jax.tree.map(lambda x: x.astype(dtype), params())

        def tied_loss(w: Any, x: Any, batch: Any) -> Any:
            return jnp.mean((x @ w["embed"] @ w["head"]).astype(jnp.float32) ** 2)

        pipe = pipeline(jp.Model(embed, layer, tied_loss, tied=True), "mpmd", 8)
        rows = {"x": batch()["x"].astype(dtype)}
        step = pipe.jit(pipe.value_and_grad)
        return str(step.lower(pipe.shard(whole), rows).program).count("send")

    assert transfers(jnp.bfloat16) == transfers(jnp.float32) > 0


@pytest.mark.parametrize("row", ROWS)
def test_dropout_keys_that_no_two_engines_draw_alike_from_are_refused(row: str):
    def dropping(w: Any, x: Any, batch: Any, key: Any) -> Any:
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.where(kept, layer(w, x, batch), jnp.zeros_like(x))

    pipe = pipeline(jp.Model(embed, dropping, loss), row)
    for key, match in (
        (jax.random.key(0, impl="rbg"), "`key` is key<rbg>. What it draws depends on the mesh"),
        (jax.random.key(0, impl="unsafe_rbg"), "impl='threefry2x32'"),
        (jax.random.PRNGKey(0), r"`key` is uint32\[2\]. Give .*jax.random.wrap_key_data"),
        (jax.random.split(jax.random.key(0)), r"`key` has shape \(2,\). Give one key"),
        (0, "`key` is int. Give a typed key"),
    ):
        with pytest.raises(ValueError, match=match):
            run(pipe, params(), batch(), key)
    with jax.default_prng_impl("rbg"):
        assert np.isfinite(run(pipe, params(), batch(), jax.random.key(0, impl="threefry2x32"))[0])
        assert pipe.memory(params(), batch())
