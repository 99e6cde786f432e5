"""Stages on several ranks: each rank accumulates its own microbatches, one stores the weights."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxpipe.mpmd import Add, Concat, Max, mark_stage_end, mpmd_jit_with_loop, treduce
from jaxpipe.schedules import Schedule, build, check, parse
from mpmd.small import (
    assert_close,
    batch,
    compare,
    groups,
    layer,
    layers,
    sends,
    squared_error,
    training,
)

DUALPIPE = "dualpipe"


def test_steps_of_training_store_weights_and_moments_on_one_rank():
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    step = mpmd_jit_with_loop(training(optimizer, DUALPIPE), groups(4), donate_argnums=0)
    true = jax.jit(training(optimizer, DUALPIPE))
    weights = layers(4)
    state = true_state = (weights, optimizer.init(weights))
    state = jax.tree.map(jnp.copy, state)
    with jax.numpy_dtype_promotion("standard"):  # optax promotes
        for _ in range(3):
            state, value = step(state, *batch(8))
            true_state, true_value = true(true_state, *batch(8))
            assert_close((state, value), (true_state, true_value))
    trained, moments = state
    assert [w["in"].mpmd_idxs for w in trained] == [(0,), (1,), (2,), (3,)]
    assert [m["out"].mpmd_idxs for m in moments[1][0].mu] == [(0,), (1,), (2,), (3,)]


def test_weights_are_sent_once_and_gradients_once():
    step = mpmd_jit_with_loop(training(optax.sgd(1e-2), DUALPIPE), groups(2))
    weights = layers(2)
    program = step.lower((weights, optax.sgd(1e-2).init(weights)), *batch(4)).program
    sizes = [tuple(b.value.aval.shape for b in send.buffers) for send in sends(program)]
    matrices = [shapes for shapes in sizes if (8, 16) in shapes]
    assert len(matrices) == 4  # each rank sends the weights that it stores, and a gradient
    first = [send for send in sends(program) if send.name == "arguments"]
    assert [(send.rank, send.to) for send in first] == [(0, 1), (1, 0)]


@dataclass(frozen=True)
class Product:
    """An operation of a user that knows how to combine what two ranks have."""

    def state(self, n: int, a: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.ones(a.shape, a.dtype)

    def update(self, state: jax.Array, update: jax.Array, index: Any) -> jax.Array:
        return state * update

    def combine(self, state: jax.Array, other: jax.Array) -> jax.Array:
        return state * other


class Secret(Product):
    """One that does not."""

    combine = None  # type: ignore[assignment]


def outputs(operation: Any, schedule: Any) -> Any:
    """What microbatches return, reduced in another way each."""

    def of_microbatch(weights: Any, x: Any, y: Any) -> Any:
        x = mark_stage_end(layer(weights[0], x))
        x = layer(weights[1], x)
        value = squared_error(x, y)
        return x, x.T, value, value + 1, {"first": y.sum()}

    def step(weights: Any, *data: Any) -> Any:
        kinds = (Concat(), Concat(-1), Max, operation, Add)
        return treduce(lambda of_m: of_microbatch(weights, *of_m), data, schedule, operation=kinds)

    return step


def test_results_of_both_ranks_are_combined_as_the_operation_says():
    compare(outputs(Product(), DUALPIPE), groups(2), layers(2), *batch(4))


def test_an_operation_that_cannot_combine_is_refused():
    with pytest.raises(ValueError, match=r"Secret.*`schedule` runs a stage on several ranks.*comb"):
        mpmd_jit_with_loop(outputs(Secret(), DUALPIPE), groups(2))(layers(2), *batch(4))


def test_a_stage_may_be_on_two_ranks_and_another_on_one():
    lopsided = check(parse("0F0 0F2 0B0 0B2\n1F0 1B0 0F1 1F1 1B1 0B1 1F2 1B2"))
    assert isinstance(lopsided, Schedule)
    step = training(optax.sgd(1e-2), lopsided)
    weights = layers(2)
    (state, _), _ = compare(step, groups(2), (weights, optax.sgd(1e-2).init(weights)), *batch(3))
    assert [w["in"].mpmd_idxs for w in state] == [(0,), (1,)]


def test_slices_are_refused():
    sliced = build("seq1f1b", ranks=2, microbatches=4)
    with pytest.raises(ValueError, match=r"marks of your own.* `jaxpipe.pipeline\("):
        mpmd_jit_with_loop(outputs(Product(), sliced), groups(2)).lower(layers(2), *batch(4))
