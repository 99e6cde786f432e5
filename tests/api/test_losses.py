"""Losses: a mean, or `Weighted`; metrics are scalars by name; sums in the loss's own dtype."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.api import Weighted

D, L, B = 4, 4, 24
ROWS = {
    "unpipelined": (None, {}),
    "circular": ("circular", {"chunks": 2}),
    "scheduled": ("zero_bubble_h1", {}),
    "mpmd": ("1f1b", {"engine": "mpmd"}),
}


def example(dtype: Any = jnp.float32) -> tuple[Any, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 6))
    params = {
        "embed": jax.random.normal(next(keys), (D, D), dtype),
        "layers": [jax.random.normal(next(keys), (D, D), dtype) / D for _ in range(L)],
        "head": jnp.linspace(-1, 1, D, dtype=dtype),
    }
    batch = {"x": jax.random.normal(next(keys), (B, D), dtype), "y": jnp.arange(B, dtype=dtype)}
    return params, batch | {"mask": (jnp.arange(B) % 5 < 3).astype(dtype)}


def layer(w: Any, x: Any, batch: Any) -> Any:
    return x + jnp.tanh(x @ w), {"size": jnp.mean(x * x)}


def errors(w: Any, x: Any, batch: Any) -> Any:
    return (x @ w - batch["y"]) ** 2


def masked(w: Any, x: Any, batch: Any) -> Any:
    loss = errors(w, x, batch) * batch["mask"]
    return Weighted(jnp.sum(loss), jnp.sum(batch["mask"])), {"largest": jnp.mean(x)}


def mean(w: Any, x: Any, batch: Any) -> Any:
    return jnp.mean(errors(w, x, batch)), {"largest": jnp.mean(x)}


MODEL = jp.Model(lambda w, batch: batch["x"] @ w, layer, mean)


def plain(loss: Any, params: Any, batch: Any) -> Any:
    """The program that a user would write without a pipeline."""
    x, size = batch["x"] @ params["embed"], 0.0
    for w in params["layers"]:
        x, aux = layer(w, x, batch)
        size = size + aux["size"]
    value, metrics = loss(params["head"], x, batch)
    return (value.mean if isinstance(value, Weighted) else value), metrics | {"size": size}


def pipeline(model: Any, row: str, microbatches: int = 6, **sizes: int) -> Any:
    schedule, options = ROWS[row]
    sizes = {"stage": 2} | sizes
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return jp.pipeline(
        model,
        schedule=schedule,
        mesh=jp.make_mesh(sizes, devices=devices),
        microbatches=microbatches,
        **options,
    )


def run(pipe: Any, params: Any, batch: Any) -> Any:
    value, grads = pipe.jit(pipe.value_and_grad)(pipe.shard(params), batch)
    return jax.tree.map(np.asarray, value), pipe.unshard(grads)


def close(got: Any, wanted: Any, tolerance: float) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True
    ):
        assert a.dtype == b.dtype, f"{path}: {a.dtype} for {b.dtype}"
        a, b = np.asarray(a), np.asarray(b)
        error = np.abs(a - b).max() / np.abs(b).max()
        assert error <= tolerance, f"{jax.tree_util.keystr(path)}: {error:.1e}"


@pytest.mark.parametrize("row", ROWS)
def test_a_masked_mean_by_name_is_that_of_the_batch(row: str):
    params, batch = example()
    model = dataclasses.replace(MODEL, loss=masked)
    wanted = jax.value_and_grad(lambda p: plain(masked, p, batch), has_aux=True)(params)
    close(run(pipeline(model, row, data=2), params, batch), wanted, 1e-5)


@pytest.mark.parametrize("row", ROWS)
def test_auxiliary_results_of_layers_may_be_constants(row: str):
    params, batch = example()

    def with_constants(w: Any, x: Any, batch: Any) -> Any:
        return layer(w, x, batch)[0], {"loss": jnp.float32(0.5), "count": 1}

    model = jp.Model(lambda w, batch: batch["x"] @ w, with_constants, mean)
    (loss, metrics), grads = run(pipeline(model, row, data=2), params, batch)
    true, true_grads = jax.value_and_grad(lambda p: plain(mean, p, batch)[0])(params)
    assert metrics["count"] == pytest.approx(L, rel=1e-5)
    close(loss, true + 0.5 * L, 1e-5)
    close(grads, true_grads, 1e-5)


@pytest.mark.parametrize("row", ROWS)
def test_a_constant_metric_beside_one_that_is_larger_than_x(row: str):
    params, batch = example()

    def with_metrics(w: Any, x: Any, batch: Any) -> Any:
        return mean(w, x, batch)[0], {"wide": jnp.tile(x, (1, 3)), "one": 1.0}

    model = jp.Model(lambda w, batch: batch["x"] @ w, layer, with_metrics)
    pipe = pipeline(model, row, data=2)
    loss, metrics = pipe.jit(pipe.value)(pipe.shard(params), batch)
    true, true_metrics = plain(with_metrics, params, batch)
    close(loss, true, 1e-5)
    assert metrics["one"] == pytest.approx(1.0, rel=1e-5)
    close(metrics["wide"], true_metrics["wide"], 1e-5)


@pytest.mark.parametrize("loss", [mean, masked])
@pytest.mark.parametrize("row", ROWS)
def test_float64_losses_are_exact_to_float64(row: str, loss: Any):
    with jax.enable_x64(True):
        params, batch = example(jnp.float64)
        model = dataclasses.replace(MODEL, loss=loss)
        wanted = jax.value_and_grad(lambda p: plain(loss, p, batch), has_aux=True)(params)
        pipe = pipeline(model, row)
        close(run(pipe, params, batch), wanted, 1e-14)
        value = pipe.jit(pipe.value)(pipe.shard(params), batch)
        close(jax.tree.map(np.asarray, value), wanted[0], 1e-14)


@pytest.mark.parametrize("row", ROWS)
def test_a_bfloat16_loss_and_metrics_are_added_up_in_float32(row: str):
    def rounded(w: Any, x: Any, batch: Any) -> Any:
        value = jnp.mean(x).astype(jnp.bfloat16)
        return value, {"one": jnp.ones((), jnp.bfloat16), "count": jnp.int32(7)}

    params, batch = example()
    # 12 ones of which each counts 1/12: in bfloat16 their sum is 1.004.
    pipe = pipeline(dataclasses.replace(MODEL, loss=rounded), row, 12)
    (loss, metrics), _ = run(pipe, params, batch)
    assert loss.dtype == metrics["one"].dtype == jnp.float32
    assert abs(metrics["one"] - 1) < 1e-6
    assert abs(metrics["count"] - 7) < 1e-5


def refused(match: str, loss: Any) -> None:
    pipe = pipeline(dataclasses.replace(MODEL, loss=loss), "scheduled")
    params, batch = example()
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(pipe.value, pipe.shard(params), batch)


def test_a_pair_of_numbers_is_refused_with_the_two_ways_to_say_what_was_meant():
    def has_aux(w: Any, x: Any, batch: Any) -> Any:
        return jnp.mean(errors(w, x, batch)), jnp.int32(len(x))

    refused(re.escape("`loss` returned (float32[], int32[]), a pair of numbers"), has_aux)
    refused(re.escape("`jp.Weighted(total, weight)` if the loss of the batch is"), has_aux)
    refused(re.escape("`(loss, {'num_tokens': num_tokens})` if"), has_aux)
    refused("a pair of numbers", lambda *given: (has_aux(*given), {"one": jnp.ones(())}))


def test_other_forms_are_refused_by_name():
    def with_metric(name: str, value: Any) -> Any:
        return lambda w, x, batch: (jnp.mean(x), {name: value})

    refused("a dict as the metric 'train'.*'train/loss': ...", with_metric("train", {"loss": 1.0}))
    refused(r"float32\[3\] as the metric 'rows'", with_metric("rows", jnp.ones(3)))
    refused("as the metric 'key'", with_metric("key", jax.random.key(0)))
    refused(r"returned float32\[3\]. Return a scalar", lambda w, x, batch: jnp.ones(3))
    refused("A loss is real", lambda w, x, batch: jnp.mean(x).astype(jnp.complex64))
    refused("Return a scalar", lambda w, x, batch: Weighted(jnp.ones(3), jnp.ones(())))
    refused("Return a scalar", lambda w, x, batch: None)

    def nested(w: Any, x: Any, batch: Any) -> Any:
        return x, {"sizes": {"x": jnp.mean(x)}}

    pipe = pipeline(dataclasses.replace(MODEL, layer=nested), "circular")
    params, batch = example()
    with pytest.raises(ValueError, match="`layer` returned a dict as the metric 'sizes'"):
        jax.eval_shape(pipe.value, pipe.shard(params), batch)


def test_the_front_door_has_names_for_completion():
    assert {"Model", "Weighted", "pipeline", "plan", "make_mesh", "nnx"} <= set(dir(jp))
    assert "importlib" not in dir(jp)
