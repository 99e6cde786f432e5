"""The mixture of examples/equinox_mixture.py is the plain module's: loss, gradients, steps."""

import functools
import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import jaxpipe as jp

FILE = Path(__file__).parents[2] / "examples" / "equinox_mixture.py"
spec = importlib.util.spec_from_file_location("equinox_mixture", FILE)
assert spec is not None and spec.loader is not None
example: Any = importlib.util.module_from_spec(spec)
sys.modules["equinox_mixture"] = example
spec.loader.exec_module(example)

SIZES = example.Sizes(layers=2)
STEPS = 3


def steps(value_and_grad: Any, tx: Any, jit: Any, params: Any) -> tuple[Any, Any, Any]:
    """Returns the losses of all steps, the first gradients, and the last parameters."""

    @jit
    def train_step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = value_and_grad(params, batch)
        with jax.numpy_dtype_promotion("standard"):  # optax wants it
            updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, grads

    state, losses, first = tx.init(params), [], None
    for step in range(STEPS):
        batch = example.make_batch(SIZES, step)
        params, state, value, grads = train_step(params, state, batch)
        losses.append(value)
        first = grads if first is None else first
    return losses, first, params


@functools.cache
def plain() -> tuple[Any, Any, Any]:
    decoder = example.make_decoder(SIZES)

    def forward(params: Any, batch: Any) -> Any:
        return example.loss(eqx.combine(params, decoder)(batch), batch)

    params = eqx.filter(decoder, eqx.is_inexact_array)
    return steps(jax.value_and_grad(forward), example.muon(1e-2), jax.jit, params)


def assert_close(tree: Any, wanted: Any) -> None:
    assert jax.tree.structure(tree) == jax.tree.structure(wanted)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(wanted), strict=True
    ):
        a, b = np.asarray(a), np.asarray(b)
        error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)
        assert error <= 1e-5, f"{jax.tree_util.keystr(path)}: {error:.1e}"


PP = {"stage": 2, "expert": 2}
FSDP = {"fsdp": 2, "expert": 2}
ROW_WISE = {"row_wise": True}  # no token is dropped, so that rows do not affect each other
ROWS = {
    "1f1b": ("1f1b", PP, {}),
    "zero bubble": ("zero_bubble_h1", PP, {}),
    "circular": ("circular", PP, {}),
    "1f1b, room for all": ("1f1b", PP, {}),
    "1f1b, fsdp": ("1f1b", PP | FSDP, ROW_WISE),
    "no pipeline, fsdp": (None, FSDP, ROW_WISE),
}
SLOW = [row for row in ROWS if row != "1f1b"]


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] * (row in SLOW)) for row in ROWS]
)
def test_loss_gradients_and_steps_of_muon_are_those_of_the_plain_module(row: str):
    schedule, sizes, options = ROWS[row]
    mesh = jp.make_mesh(sizes, devices=jax.devices()[: math.prod(sizes.values())])
    sizes_of_layers = replace(SIZES, room=1.9) if row == "1f1b, room for all" else SIZES
    model, params = example.make_model(example.make_decoder(sizes_of_layers, mesh))
    options = options | {"mesh": mesh, "microbatches": 4, "param_specs": example.expert_spec}
    pipe = jp.pipeline(model, schedule=schedule, **options)

    def value_and_grad(params: Any, batch: Any) -> Any:
        (value, _), grads = pipe.value_and_grad(params, batch)
        return value, grads

    losses, grads, params = steps(
        value_and_grad, pipe.optimizer(example.muon(1e-2)), pipe.jit, pipe.shard(params)
    )
    true_losses, true_grads, true_params = plain()
    assert_close(losses, true_losses)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(true_grads))  # the bias has one too
    as_module = functools.partial(jax.tree.unflatten, jax.tree.structure(true_params))
    assert_close(as_module(jax.tree.leaves(pipe.unshard(grads))), true_grads)
    assert_close(as_module(jax.tree.leaves(pipe.unshard(params))), true_params)
