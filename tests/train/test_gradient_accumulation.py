"""A step of several calls of an engine has the numbers of one call with all their microbatches."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxpipe.train import Config
from jaxpipe.train.estimate import speed_metrics, step_work
from jaxpipe.train.logs import describe
from jaxpipe.train.step import (
    init_state,
    make_eval_step,
    make_train_step,
    mesh_context,
    shard_batch,
)

from .runs import DEEPSEEK, NONE, ROWS, Settings, flat, setup_of
from .test_evaluate import batches

RANKS: Settings = {"ici_pipeline_parallelism": 2}
ZERO: Settings = {
    "shard_mode": "explicit",
    "ici_data_parallelism": 2,
    "shard_optimizer_over_data": True,
}
ENGINES: dict[str, tuple[int, Settings]] = {
    "none": (1, NONE),
    "experts": (1, NONE | DEEPSEEK | {"routed_bias": True}),
    "circular": (4, RANKS | ZERO | {"pipeline_fsdp_ag_once": True}),
    "scheduled": (4, RANKS | {"pipeline_engine": "scheduled", "ici_fsdp_parallelism": 2}),
    "mpmd": (2, RANKS | {"pipeline_engine": "mpmd", "pipeline_schedule": "zero_bubble_h1"}),
    "nnx": (2, RANKS | {"enable_nnx": True, "pure_nnx_decoder": True}),
}


def result(devices: int, calls: int, *settings: Settings) -> tuple[Any, Any]:
    """Metrics of a step, with the evaluation of the state after it, and the canonical state."""
    rows = {"per_device_batch_size": ROWS / devices / calls}
    split = {"num_pipeline_microbatches": 4 // calls, "gradient_accumulation_steps": calls}
    setup = setup_of(devices, *settings, split, rows)
    with mesh_context(setup.step):
        batch = shard_batch(setup.batch, batches()[1])
        state, metrics = make_train_step(setup.step)(init_state(setup.step), batch)
        after = make_eval_step(setup.step)(state["weights"], batch)
        found = flat(setup, state)
    both = dict(metrics) | {f"eval_{name}": value for name, value in after.items()}
    return {name: float(value) for name, value in both.items()}, found


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "none")) for name in ENGINES],
)
def test_calls_add_up(name: str):
    devices, settings = ENGINES[name]
    (metrics, state), (true, true_state) = (result(devices, n, settings) for n in (2, 1))
    assert metrics.keys() == true.keys()
    for key in metrics:
        np.testing.assert_allclose(metrics[key], true[key], rtol=1e-5, err_msg=key)
    moments = state["optimizer"][0].mu, true_state["optimizer"][0].mu
    for leaf, of_one in zip(*map(jax.tree.leaves, moments), strict=True):
        np.testing.assert_allclose(leaf, of_one, rtol=0, atol=1e-5 * np.abs(of_one).max())


@pytest.mark.slow
def test_every_call_has_dropout_masks_of_its_own():
    """Twice the same rows are not twice the same loss."""
    half = {name: rows[: ROWS // 2] for name, rows in batches()[0].items()}
    twice = {name: np.concatenate([rows, rows]) for name, rows in half.items()}
    found = []
    for calls, batch in ((1, half), (2, twice)):
        rows = {"per_device_batch_size": ROWS / 2, "num_pipeline_microbatches": 2}
        more = {"gradient_accumulation_steps": calls, "dropout_rate": 0.3}
        setup = setup_of(1, NONE, rows, more)
        with jax.set_mesh(setup.mesh):
            placed = shard_batch(setup.batch, batch)
            _, metrics = make_train_step(setup.step)(init_state(setup.step), placed)
        found.append(float(metrics["loss"]))
    assert abs(found[0] - found[1]) > 1e-4


def test_tokens_and_operations_of_all_calls_count():
    one, three = (setup_of(1, NONE, {"gradient_accumulation_steps": n}) for n in (1, 3))
    single, triple = (step_work(run.state.weights, run.batch) for run in (one, three))
    assert triple.flops == 3 * single.flops
    tokens = (speed_metrics(work, 1.0)["tokens_per_second"] for work in (single, triple))
    assert 3 * next(tokens) == next(tokens)
    assert "4 microbatches of 2 x 16 tokens, 3 times a step" in describe(three, 0)


def test_a_trace_of_several_loops_is_refused():
    with pytest.raises(ValueError, match=r"`mpmd_trace_step` is 2 and `gradient_accumulation_st"):
        Config(pipeline_engine="mpmd", mpmd_trace_step=2, gradient_accumulation_steps=2)
