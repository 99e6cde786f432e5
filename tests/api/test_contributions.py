"""Functions that return contributions: their sum over microbatches, devices and layers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.sharding import local_draws, sum_over_rows

D, L, M, ROWS = 8, 4, 4, 4
KEY = jax.random.key(3)


def embed(w: Any, batch: Any) -> Any:
    return batch["x"] @ w


def layer(w: Any, x: Any, batch: Any, key: Any) -> Any:
    y = jnp.tanh(x @ w)
    if not isinstance(key, tuple):
        y *= local_draws(jax.random.uniform, key, x.shape)
    # A term that sees all rows of a microbatch, of which each device returns its part.
    own = jnp.sum(y.mean(axis=1) * batch["share"])
    return x + y, {"loss": own * sum_over_rows(own), "size": jnp.sum(own)}


def loss(w: Any, x: Any, batch: Any) -> Any:
    return jnp.sum((x @ w - batch["y"]) ** 2 * batch["share"]), {"total": jnp.sum(batch["share"])}


MODEL = jp.Model(embed, layer, loss, contributions=True)


def example() -> tuple[Any, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 8))
    params = {
        "embed": jax.random.normal(next(keys), (D, D)),
        "layers": [jax.random.normal(next(keys), (D, D)) / D for _ in range(L)],
        "head": jnp.linspace(-1, 1, D),
    }
    weights = jax.random.uniform(next(keys), (M, ROWS))
    x, y = (jax.random.normal(next(keys), shape) for shape in ((M, ROWS, D), (M, ROWS)))
    return params, {"x": x, "y": y, "share": weights / weights.sum()}


def plain(params: Any, batch: Any, key: Any, layers: Any = (layer,) * L) -> Any:
    total, metrics = 0.0, {"size": 0.0, "total": 0.0}
    for m in range(M):
        inputs = jax.tree.map(lambda leaf: leaf[m], batch)  # noqa: B023
        x = embed(params["embed"], inputs)
        for i, w in enumerate(params["layers"]):
            key_of_layer = () if key is None else jax.random.fold_in(jax.random.fold_in(key, i), m)
            x, aux = layers[i](w, x, inputs, key_of_layer)
            total, metrics["size"] = total + aux["loss"], metrics["size"] + aux["size"]
        value, of_loss = loss(params["head"], x, inputs)
        total, metrics["total"] = total + value, metrics["total"] + of_loss["total"]
    return total, metrics


ENGINES = {
    "unpipelined": (None, {}),
    "circular": ("circular", {"chunks": 2}),
    "scheduled": ("zero_bubble_h1", {}),
    "mpmd": ("1f1b", {"engine": "mpmd"}),
}


def pipeline(engine: str, sizes: dict[str, int], model: Any = MODEL, **options: Any) -> Any:
    schedule, more = ENGINES[engine]
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = jp.make_mesh(sizes, devices=devices)
    return jp.pipeline(model, schedule=schedule, mesh=mesh, **{"microbatches": M} | more | options)


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "dropout"])
@pytest.mark.parametrize("engine", ENGINES)
def test_loss_metrics_and_gradients_are_sums(engine: str, key: Any):
    sizes = {"stage": 2} if engine == "mpmd" else {"stage": 2, "data": 2, "fsdp": 2}
    params, batch = example()
    pipe = pipeline(engine, sizes)
    step = pipe.jit(lambda params, batch: pipe.value_and_grad(params, batch, key))
    (value, metrics), grads = step(pipe.shard(params), batch)
    true = jax.value_and_grad(plain, has_aux=True)(params, batch, key)
    found = (float(value), jax.tree.map(float, metrics)), pipe.unshard(grads)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(true), strict=True):
        error = np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max()
        assert error <= 1e-5


CONSTANTS = {"kind": np.array([0, 0, 1, 0]), "factor": np.array([0.5, 2.0, -1.0, 3.0], np.float32)}


def chosen(activate: Any, factor: float) -> Any:
    """A layer in which it is static what it computes."""

    def run(w: Any, x: Any, batch: Any, key: Any) -> Any:
        y, aux = layer(w, x, batch, key)
        return x + activate(factor * (y - x)), aux

    return run


def choosing(w: Any, x: Any, batch: Any, given: Any) -> Any:
    """A layer that chooses by its constants."""
    key, of_layer = given
    y, aux = layer(w, x, batch, key)
    y = jax.lax.switch(of_layer["kind"], [jnp.sin, jax.nn.gelu], of_layer["factor"] * (y - x))
    return x + y, aux


CHOOSING = jp.Model(embed, choosing, loss, contributions=True, layer_constants=CONSTANTS)


@pytest.mark.parametrize(
    "key", [pytest.param(None, marks=pytest.mark.slow, id="plain"), pytest.param(KEY, id="dropout")]
)
@pytest.mark.parametrize(
    "engine", [pytest.param(e, marks=[pytest.mark.slow] * (e != "circular")) for e in ENGINES]
)
def test_layers_of_one_stack_choose_by_constants_what_they_compute(engine: str, key: Any):
    params, batch = example()
    uneven = {"layers_per_stage": [1, 3]} if engine in ("scheduled", "mpmd") else {}
    pipe = pipeline(engine, {"stage": 2}, CHOOSING, **uneven)
    step = pipe.jit(lambda params, batch: pipe.value_and_grad(params, batch, key))
    (value, _), grads = step(pipe.shard(params), batch)
    layers = [
        chosen((jnp.sin, jax.nn.gelu)[kind], factor)
        for kind, factor in zip(CONSTANTS["kind"], CONSTANTS["factor"], strict=True)
    ]
    true = jax.value_and_grad(lambda p: plain(p, batch, key, layers)[0])(params)
    found = float(value), pipe.unshard(grads)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(true), strict=True):
        error = np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max()
        assert error <= 1e-5


def test_constants_of_other_layers_or_of_a_model_of_means_are_refused():
    params, batch = example()
    others = dataclasses.replace(CHOOSING, layer_constants=np.zeros(3))
    pipe = pipeline("circular", {"stage": 2}, others)
    with pytest.raises(ValueError, match=r"array of shape \(3,\), and there are 4 layers"):
        pipe.value(pipe.shard(params), batch)
    with pytest.raises(ValueError, match=r"`Model.layer_constants` is given, and .* is False"):
        pipeline("circular", {"stage": 2}, dataclasses.replace(CHOOSING, contributions=False))


@pytest.mark.parametrize("engine", ["circular", "scheduled"])
def test_layers_of_two_kinds_contribute_what_those_of_one_do(engine: str):
    params, batch = example()
    kinds = {"first": params["layers"][:2], "second": params["layers"][2:]}
    model = jp.Model(embed, {"first": layer, "second": layer}, loss, contributions=True)
    devices = jax.devices()[:4]
    mesh = jp.make_mesh({"stage": 2, "fsdp": 2}, devices=devices)
    schedule, options = ENGINES[engine]
    pipe = jp.pipeline(model, schedule=schedule, mesh=mesh, microbatches=M, **options)
    stored = pipe.shard(params | {"layers": kinds})
    (value, _), _ = pipe.jit(lambda p, b: pipe.value_and_grad(p, b, KEY))(stored, batch)
    np.testing.assert_allclose(value, plain(params, batch, KEY)[0], rtol=1e-5)


def test_what_such_a_model_does_not_read_is_refused():
    sizes, (params, batch) = {"stage": 2}, example()
    for options in ({"frozen": lambda path, leaf: False}, {"row_wise": True}):
        with pytest.raises(ValueError, match=r"`(frozen|row_wise)` is given, which is for"):
            pipeline("circular", sizes, **options)
    with pytest.raises(ValueError, match="`compute_dtype` is given"):
        pipeline("mpmd", sizes, compute_dtype=jnp.bfloat16)
    keyed = jp.Model(lambda w, batch, key: embed(w, batch), layer, loss, contributions=True)
    mesh = jp.make_mesh(sizes, devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="`embed` takes a key, which only layers are given"):
        jp.pipeline(keyed, schedule="1f1b", mesh=mesh, microbatches=M)
    pipe = pipeline("circular", sizes)
    stored = pipe.shard(params)
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)
    with pytest.raises(ValueError, match=r"shape \(16,.* its first dim is 4"):
        pipe.value_and_grad(stored, flat)
    for method in ("check", "memory", "rows"):
        with pytest.raises(ValueError, match=f"`{method}` is for functions that return means"):
            getattr(pipe, method)(params, batch)
