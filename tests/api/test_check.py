"""A pipeline compares itself with the unpipelined program."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxpipe as jp
from jaxpipe import engines
from jaxpipe.api.inspection import Comparison

D, B = 4, 8


def dropout_layer(w: Any, x: Any, batch: Any, key: Any) -> Any:
    kept = jax.random.bernoulli(key, 0.75, x.shape)
    return x + jnp.where(kept, jnp.tanh(x @ w), jnp.zeros_like(x)), {"size": jnp.mean(x * x)}


MODEL = jp.Model(
    embed=lambda w, batch: batch["x"] @ w,
    layer=dropout_layer,
    loss=lambda w, x, batch: jp.Weighted(
        jnp.sum((x @ w - batch["y"]) ** 2), jnp.sum(batch["weight"])
    ),
)


def example() -> tuple[Any, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 6))
    params = {
        "embed": jax.random.normal(next(keys), (D, D)),
        "layers": [jax.random.normal(next(keys), (D, D)) / D for _ in range(2)],
        "head": jax.random.normal(next(keys), (D,)),
    }
    batch = {"x": jax.random.normal(next(keys), (B, D)), "y": jnp.arange(float(B))}
    return params, batch | {"weight": 1 + batch["y"]}


@pytest.mark.parametrize(
    ("sizes", "engine"), [({"stage": 2, "data": 2}, "auto"), ({"stage": 2}, "mpmd")]
)
def test_a_pipeline_checks_itself(sizes: dict[str, int], engine: str):
    params, batch = example()
    mesh = jp.make_mesh(sizes, devices=jax.devices()[: 2 * len(sizes)])
    pipe = jp.pipeline(MODEL, schedule="1f1b", mesh=mesh, microbatches=2, engine=engine)
    found = pipe.check(pipe.shard(params), batch, jax.random.key(1))
    names = ["loss", "metrics['size']", "gradients['embed']", "gradients['head']"]
    assert list(found.errors) == [*names, *(f"gradients['layers'][{i}]" for i in range(2))]
    assert found.largest <= 1e-5
    lines = str(found).splitlines()
    assert lines[0].split() == ["leaf", "relative", "error"]
    assert [line.split()[0] for line in lines[1:]] == names + list(found.errors)[4:]


def test_a_long_table_has_the_loss_and_the_largest_errors():
    errors = {"loss": 0.0} | {f"gradients['layers'][{i}]": i * 1e-9 for i in range(60)}
    lines = str(Comparison(errors)).splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["loss", *list(errors)[-40:]]
    assert lines[-1] == "and 20 leaves with smaller errors; the largest of all is 5.9e-08"


def test_a_wrong_gradient_is_named(monkeypatch: pytest.MonkeyPatch):
    right = engines.ENGINES["unpipelined"]

    def wrong(*arguments: Any) -> Any:
        value, grads = right.value_and_grad(*arguments)
        stages = jax.tree.map(lambda leaf: leaf.at[..., 0, 0].set(jnp.nan), grads["stages"])
        return value, grads | {"stages": stages}

    toy = dataclasses.replace(right, name="toy", value_and_grad=wrong)
    monkeypatch.setitem(engines.ENGINES, "toy", toy)
    params, batch = example()
    mesh = jp.make_mesh({"stage": 1}, devices=jax.devices()[:1])
    pipe = jp.pipeline(MODEL, schedule=None, mesh=mesh, microbatches=2, engine="toy")
    expected = r"gradients\['layers'\]\[0\] \(relative error nan\) and 1 others are above `toler"
    with pytest.raises(AssertionError, match=expected):
        pipe.check(params, batch, jax.random.key(1))
