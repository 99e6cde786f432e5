"""The exactness harness on a user's own model."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxpipe as jp
from jaxpipe import engines
from jaxpipe.testing import check_exact

D, B = 4, 24


def embed(w: Any, batch: Any) -> Any:
    return batch["x"] @ w


def layer(w: Any, x: Any, batch: Any) -> Any:
    return x + jnp.tanh(x @ w)


def loss(w: Any, x: Any, batch: Any) -> Any:
    error = x @ w - batch["y"]
    return jnp.mean(error * error), {"bias": jnp.mean(error)}


MODEL = jp.Model(embed, layer, loss)


def params(num_layers: int) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "embed": jax.random.normal(keys[0], (D, D)),
        "layers": jax.random.normal(keys[1], (num_layers, D, D)) / D,
        "head": jax.random.normal(keys[2], (D,)),
    }


def batch() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(1))
    return {"x": jax.random.normal(keys[0], (B, D)), "y": jax.random.normal(keys[1], (B,))}


def test_a_few_cases_and_the_table():
    table = check_exact(
        MODEL, params(3), batch(), ranks=(2, 9), schedules=("1f1b", "zbv", "circular")
    )
    ran = {(c.engine, c.schedule, c.num_ranks) for c in table.cases if c.comparison}
    pipelined = {("circular", "circular"), ("scheduled", "1f1b"), ("mpmd", "1f1b")}
    more = {("scheduled", "circular"), ("mpmd", "circular"), ("unpipelined", None)}
    assert ran == {(*names, 2) for names in pipelined | more}
    assert 0 <= table.largest <= 1e-5
    text = str(table)
    assert "6 cases" in text
    assert "zbv at 2 ranks: The model has 3 layers and the schedule 4 stages" in text
    assert "there are 8 devices; `jaxpipe.emulate_devices(9)`" in text


def test_the_first_failure_names_the_case_and_the_leaf(monkeypatch: pytest.MonkeyPatch):
    right = engines.ENGINES["unpipelined"]

    def wrong(*arguments: Any) -> Any:
        value, grads = right.value_and_grad(*arguments)
        return value, grads | {"head": grads["head"] * 1.001}

    toy = dataclasses.replace(right, name="toy", value_and_grad=wrong)
    monkeypatch.setitem(engines.ENGINES, "toy", toy)
    arguments = MODEL, params(2), batch()
    options = {"ranks": (2,), "schedules": ("1f1b",), "engines": ("toy",)}
    expected = r"(?s)toy with no schedule at 2 ranks differs.*gradients\['head'\].*1\.0e-03"
    with pytest.raises(AssertionError, match=expected):
        check_exact(*arguments, **options)
    table = check_exact(*arguments, raises=False, **options)
    assert len(table.failed) == 1
    assert "1.0e-03*" in str(table)


def test_unknown_names_and_a_model_for_which_nothing_fits_are_errors():
    with pytest.raises(ValueError, match="`schedules` has '1f1c'"):
        check_exact(MODEL, params(2), batch(), schedules=("1f1c",))
    with pytest.raises(ValueError, match=r"(?s)Nothing fits.*2 layers and the schedule 8 stages"):
        check_exact(
            MODEL, params(2), batch(), ranks=(8,), schedules=("gpipe",), engines=("scheduled",)
        )


@pytest.mark.slow
def test_one_model_under_four_engines_and_thirteen_schedules_at_2_3_4_and_8_ranks():
    table = check_exact(MODEL, params(16), batch())
    print(table)
    ran = [c for c in table.cases if c.comparison]
    assert len({c.engine for c in ran}) == 4
    schedules = {c.schedule for c in ran if c.engine == "scheduled"}
    assert len(schedules) == 13
    for engine in ("scheduled", "mpmd"):
        for schedule in schedules:
            done = [c.num_ranks for c in ran if (c.engine, c.schedule) == (engine, schedule)]
            wanted = [2, 4, 8] if schedule == "dualpipe" else [2, 3, 4, 8]
            assert done == wanted, (engine, schedule)
