"""Weights of a training step: shared, frozen, unused, updated; and what is made of all of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxpipe.ir.graph import PrimitiveCall
from jaxpipe.mpmd import mark_stage_end, mpmd_jit_with_loop, treduce
from jaxpipe.mpmd.jaxpp import Eager1F1B, GPipe, Std1F1B, ZeroBubble
from mpmd.small import (
    WIDTH,
    assert_close,
    assert_equal,
    batch,
    compare,
    gradients,
    groups,
    layer,
    layers,
    marked_loss,
    numbers,
    runs,
    sends,
    squared_error,
    training,
)


@pytest.mark.parametrize("schedule", [GPipe(3), ZeroBubble(3)], ids=str)
def test_a_weight_shared_by_three_stages(schedule: Any):
    weights = {"shared": numbers(5, WIDTH, WIDTH) / 4, "stages": layers(3)}

    def loss(weights: Any, x: Any, y: Any) -> Any:
        for w in weights["stages"]:
            x = mark_stage_end(layer(w, x) + x @ weights["shared"])
        return squared_error(x, y)

    (_, grads) = compare(gradients(schedule, loss), groups(3), weights, *batch(4))
    assert [g["in"].mpmd_idxs for g in grads["stages"]] == [(0,), (1,), (2,)]


def test_first_weights_are_where_the_weights_are_from_which_a_distance_is_summed():
    """Else all weights would be sent to one rank in each step, as with the optimizer dog."""
    weights = layers(2)

    def step(weights: Any, first: Any, *data: Any) -> Any:
        distance = sum(jnp.sum((weights[i]["in"] - first[i]) ** 2) for i in range(2))
        loss, grads = gradients(Std1F1B(2), marked_loss)(weights, *data)
        return loss, jax.tree.map(lambda w, g: w - distance * g, weights, grads), first

    first = [w["in"] / 2 for w in weights]
    _, _, first = compare(step, groups(2), weights, first, *batch(4))
    assert [x.mpmd_idxs for x in first] == [(0,), (1,)]


def test_a_weight_shared_by_three_stages_is_updated_on_all_of_them():
    """Its state returns where the next step needs it."""
    weights = {"shared": numbers(5, WIDTH, WIDTH) / 4, "stages": layers(3)}
    optimizer = optax.adamw(1e-2)

    def loss(weights: Any, x: Any, y: Any) -> Any:
        for w in weights["stages"]:
            x = mark_stage_end(layer(w, x) + x @ weights["shared"])
        return squared_error(x, y)

    step = mpmd_jit_with_loop(training(optimizer, Std1F1B(3), loss), groups(3))
    true = jax.jit(training(optimizer, Std1F1B(3), loss))
    state = true_state = (weights, optimizer.init(weights))
    for _ in range(3):
        (state, _), (true_state, _) = step(state, *batch(4)), true(true_state, *batch(4))
    assert state[0]["shared"].mpmd_idxs == (0, 1, 2)
    copies = [np.asarray(state[0]["shared"].on_rank(rank)) for rank in range(3)]
    assert all((copy == copies[0]).all() for copy in copies)
    assert_close(state, true_state)


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax adds counts and numbers of other types."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("schedule", [Std1F1B(4), ZeroBubble(4)], ids=str)
def test_clip_by_global_norm(schedule: Any):
    optimizer = optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-2))
    weights = layers(4)
    step, mesh = training(optimizer, schedule), groups(4)
    compare(step, mesh, (weights, optimizer.init(weights)), *batch(4))


def test_of_a_global_norm_one_number_leaves_each_rank():
    optimizer = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(1e-2))
    weights = layers(4)
    step = mpmd_jit_with_loop(training(optimizer, Std1F1B(4)), groups(4))
    program = step.lower((weights, optimizer.init(weights)), *batch(4)).program
    after = [send for send in sends(program) if send.name.startswith("after_loop")]
    assert all(buffer.value.aval.shape == () for send in after for buffer in send.buffers)
    up, back = after[:3], after[3:]
    assert [(send.rank, send.to, len(send.buffers)) for send in up] == [
        (1, 0, 1),
        (2, 0, 1),
        (3, 0, 1),
    ]
    assert [(send.rank, send.to) for send in back] == [(0, 1), (0, 2), (0, 3)]


def test_frozen_parameters():
    """Half of the stages have no gradient, and no update either."""
    weights = layers(4)
    trained = {"1": weights[1], "3": weights[3]}
    frozen = {"0": weights[0], "2": weights[2]}

    def step(trained: Any, frozen: Any, *data: Any) -> Any:
        def loss(trained: Any, x: Any, y: Any) -> Any:
            every = trained | frozen
            return marked_loss([every[str(i)] for i in range(4)], x, y)

        value, grads = gradients(Std1F1B(4), loss)(trained, *data)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, trained, grads), frozen

    _, new, same = compare(step, groups(4), trained, frozen, *batch(4))
    assert [new[i]["in"].mpmd_idxs for i in new] == [(1,), (3,)]
    assert [same[i]["in"].mpmd_idxs for i in same] == [(0,), (2,)]


@pytest.mark.parametrize("schedule", [Std1F1B(2), ZeroBubble(2)], ids=str)
def test_frozen_parameters_by_stop_gradient_and_by_optax(schedule: Any):
    weights = layers(2)
    optimizer = optax.multi_transform(
        {"train": optax.adamw(1e-2), "freeze": optax.set_to_zero()}, ["freeze", "train"]
    )

    def loss(weights: Any, x: Any, y: Any) -> Any:
        return marked_loss([jax.lax.stop_gradient(weights[0]), weights[1]], x, y)

    state = weights, optimizer.init(weights)
    compare(training(optimizer, schedule, loss), groups(2), state, *batch(3))


@pytest.mark.parametrize("schedule", [Std1F1B(2), ZeroBubble(2)], ids=str)
def test_unused_parameters(schedule: Any):
    weights = {"stages": layers(2), "unused": numbers(9, WIDTH), "count": jnp.int32(3)}

    def step(weights: Any, *data: Any) -> Any:
        def loss(stages: Any, x: Any, y: Any) -> Any:
            return marked_loss(stages["stages"], x, y)

        whole = {name: weights[name] for name in ("stages", "unused")}
        value, grads = gradients(schedule, loss)(whole, *data)
        new = jax.tree.map(lambda w, g: w - 0.1 * g, whole, grads)
        return value, new | {"count": weights["count"] + 1}

    compare(step, groups(2), weights, *batch(3))


def test_constant_auxiliary_outputs():
    """Constants that the loss returns beside its value, and some that the step returns."""

    def step(weights: Any, *data: Any) -> Any:
        def loss(weights: Any, x: Any, y: Any) -> Any:
            more = {"one": 1.0, "count": jnp.int32(5), "ones": jnp.ones(3)}
            return marked_loss(weights, x, y), more

        grad = jax.value_and_grad(loss, has_aux=True)
        out = treduce(lambda of_m: grad(weights, *of_m), data, schedule=Std1F1B(2))
        return out, 7, jnp.zeros(2), np.arange(3, dtype=np.int32)

    compare(step, groups(2), layers(2), *batch(3))


@pytest.mark.parametrize("schedule", [Eager1F1B(4), ZeroBubble(4)], ids=str)
def test_skip_connections_over_stages(schedule: Any):
    """What stage 0 makes, stages 2 and 3 read too."""

    def loss(weights: Any, x: Any, y: Any) -> Any:
        first = mark_stage_end(layer(weights[0], x))
        second = mark_stage_end(layer(weights[1], first))
        third = mark_stage_end(layer(weights[2], second + jnp.sin(first)))
        return squared_error(mark_stage_end(layer(weights[3], third * first)), y)

    compare(gradients(schedule, loss), groups(4), layers(4), *batch(4))


def in_bfloat16(weights: Any, x: Any, y: Any) -> Any:
    cast = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    return marked_loss(cast, x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)).astype(jnp.float32)


def casts_of_weights(run: Any) -> int:
    """How many weights a program casts to bfloat16."""
    return sum(
        isinstance(step.operation, PrimitiveCall)
        and step.operation.name == "convert_element_type"
        and step.outputs[0].aval.dtype == jnp.bfloat16
        and step.outputs[0].aval.shape in ((WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH))
        for step in run.graph.eqns
    )


def test_casts_of_weights_come_out_of_the_loop():
    args = layers(2), *batch(4)
    step = mpmd_jit_with_loop(gradients(Std1F1B(2), in_bfloat16), groups(2))
    found = runs(step.lower(*args).program)
    casts = {(run.name, run.rank): n for run in found if (n := casts_of_weights(run))}
    assert casts == {("before_loop", 0): 2, ("before_loop", 1): 2}


@pytest.mark.parametrize("schedule", [GPipe(2), Std1F1B(2), ZeroBubble(2)], ids=str)
def test_casts_that_come_out_of_the_loop_change_no_number(schedule: Any):
    """Gradients are those of the float32 weights, and to the last bit those of `jax.jit`, which
    casts in every microbatch."""
    args = layers(2), *batch(4)
    value, grads = compare(gradients(schedule, in_bfloat16), groups(2), *args)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert_equal((value, grads), jax.jit(gradients(schedule, in_bfloat16))(*args))


def test_what_only_moves_numbers_is_computed_in_order_where_the_loop_and_its_outside_need_it():
    """A constraint on what is made of a weight, which both read."""

    def loss(weights: Any, x: Any, y: Any) -> Any:
        first = weights[0]["in"][0]
        total = jax.lax.with_sharding_constraint(jnp.stack([first, first]).sum(0), P())
        nothing = jnp.sum(total * (first - jax.lax.stop_gradient(first)))
        return marked_loss(weights, x, y) + nothing

    compare(gradients(Std1F1B(2), loss), groups(2, fsdp=2), layers(2), *batch(3))
