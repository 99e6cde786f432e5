"""What JAX's settings and contexts mean for a step, and what is said of effects and schedules."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, io_callback

from jaxpipe.mpmd import mark_stage_end, mpmd_jit_with_loop
from jaxpipe.mpmd.jaxpp import Std1F1B, ZeroBubble
from jaxpipe.mpmd.profiling import collect_task_times_ms
from mpmd.small import (
    assert_close,
    batch,
    compare,
    gradients,
    groups,
    layer,
    layers,
    marked_loss,
    squared_error,
)


def test_jax_debug_nans_names_the_task_its_stage_microbatch_and_rank():
    def loss(weights: Any, x: Any, y: Any) -> Any:
        x = mark_stage_end(layer(weights[0], x))
        return squared_error(layer(weights[1], x), jnp.log(y))

    xs, ys = batch(3)
    ys = jnp.abs(ys) + 1
    step = mpmd_jit_with_loop(gradients(Std1F1B(2), loss), groups(2))
    step(layers(2), xs, ys)
    message = (
        "Task FusedTask(fwd_1__2, bwd_1__2), the forward of stage 1 for microbatch 2 and the "
        "backward of stage 1 for microbatch 2, on rank 1 returned nan, and no task before it did."
    )
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=re.escape(message)):
        step(layers(2), xs, ys.at[2].set(-1.0))


@pytest.mark.parametrize("schedule", [Std1F1B(2), ZeroBubble(2)], ids=lambda s: type(s).__name__)
def test_x64_as_a_context_around_trace_and_call(schedule: Any):
    """Threads that compile have the types of the context too."""
    with jax.enable_x64(True):
        args = jax.tree.map(lambda x: np.asarray(x, np.float64), (layers(2), *batch(3)))
        value, grads = mpmd_jit_with_loop(gradients(schedule), groups(2))(*args)
        true = jax.jit(gradients(schedule))(*args)
        assert_close((value, grads), true)
        assert value.dtype == np.float64
        difference = np.abs(np.asarray(value) - np.asarray(true[0]))
        assert difference < 1e-12, "computed in float64, not in float32"


EFFECTS = {
    "jax.debug.print(ordered=True)": lambda x: jax.debug.print("{}", x[0, 0], ordered=True),
    "jax.debug.callback(ordered=True)": lambda x: jax.debug.callback(
        lambda x: None, x, ordered=True
    ),
    "jax.experimental.io_callback": lambda x: io_callback(lambda x: None, None, x),
    "checkify.check": lambda x: checkify.check(x[0, 0] > 0, "not positive"),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_effects_in_a_stage_and_behind_the_loop_are_refused_by_name(name: str):
    def loss(weights: Any, x: Any, y: Any) -> Any:
        jax.jit(EFFECTS[name])(x)
        return marked_loss(weights, x, y)

    def behind(weights: Any, *data: Any) -> Any:
        _, grads = gradients(Std1F1B(2))(weights, *data)
        jax.debug.print("allowed {}", grads[0]["in"])
        EFFECTS[name](grads[0]["in"])
        return grads

    for f, what in ((gradients(Std1F1B(2), loss), "A stage"), (behind, "The function")):
        with pytest.raises(ValueError, match=re.escape(f"{what} has the effects of `{name}`.")):
            mpmd_jit_with_loop(f, groups(2)).lower(layers(2), *batch(2))


def test_a_schedule_may_be_a_name_of_the_registry():
    compare(gradients("1f1b"), groups(2), layers(2), *batch(3))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            None,
            "`schedule` is None. Give a schedule with its number of stages, such as `Std1F1B(2)`",
        ),
        (Std1F1B, "`schedule` is the class Std1F1B. Give a schedule with its number of stages"),
        ("1f2b", "There is no schedule '1f2b'. Did you mean '1f1b'?"),
    ],
    ids=str,
)
def test_what_is_no_schedule_is_refused(schedule: Any, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        mpmd_jit_with_loop(gradients(schedule), groups(2)).lower(layers(2), *batch(2))


def test_collect_task_times_ms_is_jaxpps_context_manager():
    """All steps in it are measured, each microbatch of them; it may be switched off."""
    args = layers(2), *batch(3)
    step = mpmd_jit_with_loop(gradients(Std1F1B(2)), groups(2))
    with collect_task_times_ms() as times:
        result = step(*args)
        step(*args)
    assert len(times["fwd_0"]) == len(times["bwd_0"]) == 2 * 3
    assert len(times["FusedTask(fwd_1, bwd_1)"]) == 2 * 3
    assert all(ms > 0 for of_task in times.values() for ms in of_task)
    with collect_task_times_ms(enabled=False) as nothing:
        assert_close(step(*args), jax.tree.map(np.asarray, result))
    assert nothing is None
    assert len(times["fwd_0"]) == 2 * 3
