"""What the user has given or been given is the user's: donations do not delete it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe as jp

D, L, B = 4, 4, 16
ROWS = {
    "unpipelined": (None, {}),
    "circular": ("circular", {}),
    "scheduled": ("zbv", {}),
    "mpmd": ("1f1b", {"engine": "mpmd"}),
    "mpmd, zbv": ("zbv", {"engine": "mpmd"}),
}


def params() -> dict[str, Any]:
    """A tree with one array as embedding and as head."""
    table = jax.random.normal(jax.random.key(0), (D, D))
    layers = jax.random.normal(jax.random.key(1), (L, D, D)) / D
    return {"embed": table, "layers": layers, "head": table}


def batch() -> dict[str, jax.Array]:
    return {"x": jax.random.normal(jax.random.key(2), (B, D))}


MODEL = jp.Model(
    embed=lambda w, batch: batch["x"] @ w,
    layer=lambda w, x, batch: x + jnp.tanh(x @ w),
    loss=lambda w, x, batch: jnp.mean((x @ w) ** 2),
)


def pipeline(row: str, **sizes: int) -> Any:
    schedule, options = ROWS[row]
    sizes = {"stage": 2} | sizes
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = jp.make_mesh(sizes, devices=devices)
    return jp.pipeline(MODEL, schedule=schedule, mesh=mesh, microbatches=4, **options)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("row", ROWS)
def test_donating_stored_parameters_deletes_neither_the_users_nor_the_unsharded(
    row: str, num_ranks: int
):
    pipe, given = pipeline(row, stage=num_ranks), params()

    def step(stored: Any, batch: Any) -> Any:
        return pipe.tree_map(lambda w, g: w - g, stored, pipe.value_and_grad(stored, batch)[1])

    step = pipe.jit(step, donate_argnums=0)
    stored = pipe.shard(given)
    returned = pipe.unshard(stored)
    stored = step(step(stored, batch()), batch())
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(returned), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.isfinite(np.asarray(jax.tree.leaves(stored)[0])).all()


@pytest.mark.parametrize("axis", ["fsdp", "data"])
def test_a_program_without_inputs_is_compiled_for_the_group_that_runs_it(axis: str):
    """Of an optimizer's first state, which is zeros; equal stages share a program."""
    pipe = pipeline("mpmd", stage=4, **{axis: 2})
    stored = pipe.shard(params())
    state = pipe.jit(optax.adam(1e-3).init)(stored)[0]
    for weights, moments in zip(jax.tree.leaves(stored), jax.tree.leaves(state.mu), strict=True):
        np.testing.assert_array_equal(moments, np.zeros(weights.shape))
