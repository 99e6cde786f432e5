"""What may be marked: scalar losses, trees with constants and integers, and what is not used."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpipe.mpmd import mark_stage_end, mpmd_jit_with_loop, treduce
from jaxpipe.mpmd.jaxpp import DualPipeV, GPipe, Interleaved1F1B, Std1F1B, ZeroBubble
from mpmd.small import batch, compare, groups, layer, layers, runs, squared_error

SCHEDULES = [Std1F1B(2), ZeroBubble(2), GPipe(3), Interleaved1F1B(4, 2), DualPipeV(4)]


def scalar_loss(weights: Any, x: Any, y: Any) -> Any:
    """The last mark is on the loss itself, so its cotangent is the literal 1.0."""
    for w in weights[:-1]:
        x = mark_stage_end(layer(w, x))
    return mark_stage_end(squared_error(layer(weights[-1], x), y))


def loss_and_aux(weights: Any, x: Any, y: Any) -> Any:
    """Every mark is around a tree: an array, a sum of losses, an integer."""
    aux = jnp.float32(0)
    for w in weights:
        x, aux, largest = mark_stage_end((layer(w, x), aux + jnp.mean(x**2), jnp.argmax(x)))
    return squared_error(x, y) + aux, {"largest": largest}


def constants(weights: Any, x: Any, y: Any) -> Any:
    """Literals and None among what is marked."""
    for w in weights:
        x, one, two, _ = mark_stage_end((layer(w, x), 1.0, jnp.float32(2), None))
        x = x * one + two
    return squared_error(x, y)


def integers_and_booleans(weights: Any, x: Any, y: Any) -> Any:
    for i, w in enumerate(weights):
        x, count, positive = mark_stage_end((layer(w, x), jnp.arange(3) + i, x > 0))
        x = jnp.where(positive, x, 2 * x) + count[0].astype(jnp.float32)
    return squared_error(x, y)


def tree_around_the_loss(weights: Any, x: Any, y: Any) -> Any:
    for w in weights[:-1]:
        x = mark_stage_end(layer(w, x))
    x = layer(weights[-1], x)
    return mark_stage_end((squared_error(x, y), {"x": x, "positive": x > 0}))


def checkpointed_with_aux(weights: Any, x: Any, y: Any) -> Any:
    stage = jax.checkpoint(lambda w, x, aux: mark_stage_end((layer(w, x), aux + jnp.mean(x**2))))
    aux = jnp.float32(0)
    for w in weights:
        x, aux = stage(w, x, aux)
    return squared_error(x, y) + aux


def loss_of_the_first_stage(weights: Any, x: Any, y: Any) -> Any:
    """Cotangents flow through the first mark alone, metrics through all."""
    first = None
    for w in weights:
        x = mark_stage_end(layer(w, x))
        first = x if first is None else first
    return jnp.mean((first - y) ** 2), x


def loss_of_the_first_stage_alone(weights: Any, x: Any, y: Any) -> Any:
    """What comes behind the first mark is not needed at all."""
    return loss_of_the_first_stage(weights, x, y)[0]


CASES = [
    scalar_loss,
    loss_and_aux,
    constants,
    integers_and_booleans,
    tree_around_the_loss,
    checkpointed_with_aux,
    loss_of_the_first_stage,
    loss_of_the_first_stage_alone,
]
WITH_AUX = (loss_and_aux, tree_around_the_loss, loss_of_the_first_stage)


def step_of(loss: Callable, schedule: Any) -> Callable:
    def step(weights: Any, *data: Any) -> Any:
        grad = jax.value_and_grad(loss, has_aux=loss in WITH_AUX)
        return treduce(lambda of_m: grad(weights, *of_m), data, schedule)

    return step


def check(loss: Callable, schedule: Any) -> None:
    args = layers(schedule.num_stages), *batch(4)
    compare(step_of(loss, schedule), groups(schedule.mpmd_dim), *args)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
def test_the_last_mark_may_be_on_a_scalar_loss(schedule: Any):
    check(scalar_loss, schedule)


@pytest.mark.parametrize("loss", CASES[1:])
@pytest.mark.parametrize("schedule", SCHEDULES[:2], ids=lambda s: type(s).__name__)
def test_trees_of_all_kinds_may_be_marked(loss: Callable, schedule: Any):
    check(loss, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("loss", CASES[1:])
@pytest.mark.parametrize("schedule", SCHEDULES[2:], ids=lambda s: type(s).__name__)
def test_trees_of_all_kinds_may_be_marked_under_every_schedule(loss: Callable, schedule: Any):
    check(loss, schedule)


def test_a_backward_that_skips_the_last_stages_runs_on_the_ranks_of_the_first():
    """Two marks behind the last cotangent: the backward of stage 0 is still on rank 0."""
    step = step_of(loss_of_the_first_stage, GPipe(3))
    program = mpmd_jit_with_loop(step, groups(3)).lower(layers(3), *batch(1)).program
    found = [(i.rank, i.name) for i in runs(program) if i.actions]
    assert (0, "bwd_0__0") in found
    assert not [name for _, name in found if name.startswith("bwd_2")]
    assert [ranks for _, ranks in program.inputs[:2]] == [(0,), (0,)], "its weights are there alone"


def test_gradients_alone_of_a_linear_loss():
    """The forward then needs no mark behind the last stage, and the backward begins with one."""

    def step(weights: Any, xs: Any) -> Any:
        def loss(weights: Any, x: Any) -> Any:
            for w in weights:
                x = mark_stage_end(layer(w, x))
            return jnp.sum(x)

        def of_microbatch(x: Any) -> Any:
            return jnp.sum(x), jax.grad(loss)(weights, x)

        return treduce(of_microbatch, xs, Std1F1B(2))

    compare(step, groups(2), layers(2), batch(3)[0])
