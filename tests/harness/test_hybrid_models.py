"""Twenty steps of models whose layers differ are those of their authors' programs.

They run in float64: twenty steps in float32 amplify the rounding of sums in another order, by which
experts of other tokens are chosen.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpipe as jp

from .hybrid_models import HYBRIDS, Hybrid, Sizes

STEPS, TOLERANCE = 20, 1e-9
FAMILIES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble_h1", "zbv", "looped_bfs")
ENGINES: list[tuple[str, str | None]] = [
    ("unpipelined", None),
    ("circular", "circular"),
    *((engine, family) for engine in ("scheduled", "mpmd") for family in FAMILIES),
]
MESHES: list[dict[str, int]] = [{"stage": 4}, {"stage": 4, "fsdp": 2}]
ROWS = [(name, *engine, i) for name in HYBRIDS for engine in ENGINES for i in range(len(MESHES))]


@pytest.fixture(autouse=True)
def wide_numbers() -> Iterator[None]:
    """The models rely on promotion, as most programs do."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def in_ci(i: int) -> bool:
    """A row of a model of each library and of functions, each of another engine and schedule."""
    models = (2, 5, 6)
    return i in {(len(ENGINES) * n + 5 * n + 2) * len(MESHES) + n % 2 for n in models}


@cache
def hybrid(name: str) -> Hybrid:
    return HYBRIDS[name](Sizes())


def optimizer() -> Any:
    return optax.sgd(5e-3, momentum=0.9)


@cache
def plain_run(name: str) -> tuple[Any, list[float]]:
    """Parameters and losses of twenty steps of the author's program."""
    own, tx = hybrid(name), optimizer()

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(own.plain)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params, losses = own.params, []
    state = tx.init(params)
    for i in range(STEPS):
        params, state, value = step(params, state, own.batch(i))
        losses.append(float(value))
    return jax.device_get(params), losses


@pytest.mark.parametrize(
    ("name", "engine", "schedule", "mesh"),
    [pytest.param(*row, marks=() if in_ci(i) else pytest.mark.slow) for i, row in enumerate(ROWS)],
)
def test_twenty_steps_are_those_of_the_plain_program(
    name: str, engine: str, schedule: str | None, mesh: int
):
    own, sizes = hybrid(name), MESHES[mesh]
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    pipe = jp.pipeline(
        own.model,
        schedule=schedule,
        engine=engine,
        mesh=jp.make_mesh(sizes, devices=devices),
        microbatches=8,
    )
    tx = pipe.optimizer(optimizer())
    params = pipe.shard(own.params)
    state = tx.init(params)

    @pipe.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        (value, _), grads = pipe.value_and_grad(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for i in range(STEPS):
        params, state, value = step(params, state, own.batch(i))
        losses.append(float(value))
    wanted, plain_losses = plain_run(name)
    assert plain_losses[-1] != plain_losses[0]
    np.testing.assert_allclose(losses, plain_losses, rtol=TOLERANCE)
    got = jax.device_get(pipe.unshard(params))
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True)
    for (path, a), b in pairs:
        error = np.abs(a - b).max() / np.abs(b).max()
        assert error <= TOLERANCE, f"{jax.tree_util.keystr(path)}: {error:.1e}"
