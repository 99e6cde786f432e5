"""A stage that returns its activation alone, in every engine."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harness.contract import assert_close
from jaxpipe import mpmd, schedules, sharding
from jaxpipe.autodiff import StagedModel, unpipelined
from jaxpipe.mpmd.api import mpmd_value_and_grad
from jaxpipe.schedules import lock_step
from jaxpipe.spmd import circular_engine, scheduled_engine

S, M, D = 2, 2, 3
SCHEDULE = schedules.build("1f1b", ranks=S, microbatches=M)


def stage(w, x, batch_inputs, rng):
    return jnp.tanh(x @ w)


def model(stage: Any) -> StagedModel:
    return StagedModel(
        embed=lambda w, batch_inputs: batch_inputs["x"] * w,
        stage=stage,
        loss=lambda boundary, y, batch_inputs: (jnp.sum(y * boundary["head"]), {}),
    )


def on_groups(model: StagedModel, weights: Any, batch_inputs: Any) -> Any:
    """The engine of programs per rank: its stages are a list."""
    groups = mpmd.MpmdMesh(sharding.make_mesh({"stage": S}, devices=jax.devices()[:S]), "stage")
    apart = weights | {"stages": list(weights["stages"][0])}
    run = functools.partial(mpmd_value_and_grad, model, schedule=SCHEDULE)
    value, grads = jax.tree.map(
        np.asarray, mpmd.mpmd_jit_with_loop(run, groups)(apart, batch_inputs)
    )
    return value, grads | {"stages": np.stack(grads["stages"])[None]}


def plain(model: StagedModel, weights: Any, batch_inputs: Any) -> Any:
    flat = weights | {"stages": weights["stages"][0]}
    value, grads = unpipelined.value_and_grad(model, flat, batch_inputs)
    return value, grads | {"stages": grads["stages"][None]}


ENGINES = {
    "plain": plain,
    "circular": circular_engine.circular_value_and_grad,
    "scheduled": functools.partial(
        scheduled_engine.scheduled_value_and_grad, ticks=lock_step.to_lock_step(SCHEDULE)
    ),
    "mpmd": on_groups,
}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stage_may_return_its_activation_alone(engine):
    key = jax.random.key(0)
    weights = {
        "embed": jnp.linspace(0.5, 1.5, D),
        "stages": jax.random.normal(key, (1, S, D, D)),
        "head": jnp.linspace(1.5, 0.5, D),
    }
    batch_inputs = {"x": jax.random.normal(jax.random.fold_in(key, 1), (M, 4, D))}

    def loss(weights):
        w1, w2 = weights["stages"][0]
        y = jnp.tanh(jnp.tanh(batch_inputs["x"] * weights["embed"] @ w1) @ w2)
        return jnp.sum(y * weights["head"])

    run = functools.partial(ENGINES[engine], model(stage))
    (value, metrics), grads = (run if engine == "mpmd" else jax.jit(run))(weights, batch_inputs)
    true_value, true_grads = jax.value_and_grad(loss)(weights)
    assert metrics == {}
    assert_close(value, true_value, "loss")
    jax.tree.map(lambda a, b: assert_close(a, b, "gradient"), grads, true_grads)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stage_that_returns_something_else_is_told_what_it_must_return(engine):
    weights = {"embed": jnp.ones(D), "stages": jnp.ones((1, S, D, D)), "head": jnp.ones(D)}
    batch_inputs = {"x": jnp.ones((M, 4, D))}
    wrong = model(lambda w, x, batch_inputs, rng: (x, x))
    with pytest.raises(ValueError, match=r"`stage` was given .*It must return y"):
        ENGINES[engine](wrong, weights, batch_inputs)
    shorter = model(lambda w, x, batch_inputs, rng: x[1:])
    with pytest.raises(ValueError, match=r"given float32\[4, 3\] and returned float32\[3, 3\]"):
        ENGINES[engine](shorter, weights, batch_inputs)
