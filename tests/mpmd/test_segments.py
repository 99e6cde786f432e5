"""What runs outside of loops: before which of them, and what is kept across it."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.mpmd import mpmd_jit_with_loop
from jaxpipe.mpmd.jaxpp import Std1F1B
from mpmd.small import WIDTH, assert_close, batch, gradients, groups, layers, runs

MATRIX = (WIDTH, 2 * WIDTH)


def reads(program: Any, name: str, rank: int) -> int:
    """How many matrices a program takes."""
    (run,) = (i for i in runs(program) if (i.name, i.rank) == (name, rank))
    return sum(buffer.value.aval.shape == MATRIX for buffer in run.reads)


def test_what_is_made_for_a_loop_can_be_used_after_it_too():
    loss_and_gradients = gradients(Std1F1B(2))

    def step(weights: Any, *data: Any) -> Any:
        doubled = jax.tree.map(lambda w: 2 * w, weights)
        found = loss_and_gradients(jax.tree.map(jnp.sin, doubled), *data)
        return found, jax.tree.map(lambda w: 3 * w, doubled)

    args = layers(2), *batch(4)
    assert_close(mpmd_jit_with_loop(step, groups(2))(*args), jax.jit(step)(*args))


def test_gradients_of_several_loops_are_added_before_the_next_one():
    loss_and_gradients = gradients(Std1F1B(2))

    def step(weights: Any, *data: Any) -> Any:
        x, y = (part.reshape(4, -1, *part.shape[1:]) for part in data)
        found = [loss_and_gradients(weights, x[i], y[i]) for i in range(4)]
        return jax.tree.map(lambda first, *others: sum(others, start=first), *found)

    args = layers(2), *batch(16)
    pipelined = mpmd_jit_with_loop(step, groups(2))
    assert_close(pipelined(*args), jax.jit(step)(*args))
    program = pipelined.lower(*args).program
    for rank in range(2):
        for name in ("between_loops_2", "between_loops_3", "after_loop"):
            assert reads(program, name, rank) == 2
