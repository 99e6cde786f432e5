"""Derivatives and `jax.shard_map` inside of stages, and derivatives across their marks.

The reference is the same function without marks, loops and groups, on one device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpipe.mpmd import Add, MpmdMesh, mark_stage_end, mpmd_jit_with_loop, treduce
from mpmd.small import assert_close, groups, numbers

WEIGHTS = [numbers(0, 8, 8) / 3, numbers(1, 8, 8) / 3]
XS = numbers(2, 3, 4, 8)  # microbatches, rows, width


def in_loop(f: Callable, schedule: str = "1f1b") -> Callable[..., Any]:
    """Returns `(weights, xs) ->` the sum of `f(weights, x)` over microbatches."""
    return lambda weights, xs: treduce(partial(f, weights), xs, schedule=schedule, operation=Add)


def over(stage: Callable, mark: Callable = mark_stage_end) -> Callable[..., Any]:
    """Returns the loss of two stages."""

    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = mark(stage(w, x))
        return jnp.sum(x**2)

    return loss


def total(f: Callable) -> Any:
    """The sum of `f` over microbatches, in plain JAX on one device."""
    results = [jax.jit(f)(WEIGHTS, x) for x in XS]
    return jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *results)


def plain(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


# Derivatives.


def descent(w: Any, x: Any) -> Any:
    """A step of descent and a directional derivative: the backward has second derivatives."""

    def energy(x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    return x - jax.grad(energy)(x) + jax.jvp(energy, (x,), (jnp.cos(x),))[1]


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1"])
def test_second_derivatives_inside_of_stages(schedule: str):
    step = mpmd_jit_with_loop(in_loop(jax.value_and_grad(over(descent)), schedule), groups(2))
    true = total(jax.value_and_grad(over(descent, lambda x: x)))
    assert_close(step(WEIGHTS, XS), true)


def test_gradients_of_inputs_cross_marks_and_are_read_after_them():
    def norm(weights: Any, x: Any, mark: Callable = mark_stage_end) -> Any:
        value, grad = jax.value_and_grad(partial(over(plain, mark), weights))(x)
        return value, jnp.sum(grad**2)

    result = mpmd_jit_with_loop(in_loop(norm), groups(2))(WEIGHTS, XS)
    assert_close(result, total(partial(norm, mark=lambda x: x)))


LOSS = over(plain)
ACROSS: dict[str, Callable] = {
    "a penalty of the input's gradient": jax.grad(
        lambda ws, x: LOSS(ws, x) + jnp.sum(jax.grad(LOSS, 1)(ws, x) ** 2)
    ),
    "a Hessian times a vector": lambda ws, x: jax.jvp(
        lambda ws: jax.grad(LOSS)(ws, x), (ws,), (ws,)
    )[1],
    "reverse over reverse": jax.grad(lambda ws, x: jnp.sum(jax.grad(LOSS)(ws, x)[0] ** 2)),
    "a directional derivative": lambda ws, x: jax.jvp(LOSS, (ws, x), (ws, x))[1],
    "linearize": lambda ws, x: jax.linearize(LOSS, ws, x)[1](ws, x),
}


@pytest.mark.parametrize("name", ACROSS)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_other_derivatives_across_marks_are_refused_by_name(name: str, schedule: str):
    with pytest.raises(ValueError, match=r"other than once by `jax\.grad`.* a gradient penalty, "):
        mpmd_jit_with_loop(in_loop(ACROSS[name], schedule), groups(2)).lower(WEIGHTS, XS)


def test_a_penalty_across_as_many_marks_as_there_are_stages_is_refused_too():
    """Two stages marked, which a derivative of a derivative marks twice, on four groups."""
    f = ACROSS["a Hessian times a vector"]
    with pytest.raises(ValueError, match="a gradient penalty"):
        mpmd_jit_with_loop(in_loop(f), groups(4)).lower(WEIGHTS, XS)


def test_a_penalty_without_marks_runs_on_one_group():
    """What the message advises."""

    def penalized(ws: Any, x: Any) -> Any:
        loss = over(plain, lambda x: x)
        return loss(ws, x) + jnp.sum(jax.grad(loss, 1)(ws, x) ** 2)

    step = mpmd_jit_with_loop(in_loop(jax.value_and_grad(penalized)), groups(1))
    assert_close(step(WEIGHTS, XS), total(jax.value_and_grad(penalized)))


# `jax.shard_map`.


def mesh_of(axis_type: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("stage", "data"), (axis_type,) * 2, devices=jax.devices()[:4])


def centered(w: Any, x: Any) -> Any:
    y = jnp.tanh(x @ w)
    return y - jnp.mean(y, 0, keepdims=True)


def centered_shards(w: Any, x: Any) -> Any:
    y = jnp.tanh(x @ w)
    return y - jax.lax.pmean(jnp.mean(y, 0, keepdims=True), "data")


@pytest.mark.parametrize("options", [{}, {"axis_names": {"data"}}, {"check_vma": False}], ids=str)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_shard_map_over_the_mesh_of_all_groups_runs_in_a_stage(axis_type: AxisType, options: Any):
    mesh = mesh_of(axis_type)

    def stage(w: Any, x: Any) -> Any:
        specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
        return jax.shard_map(centered_shards, mesh=mesh, **specs, **options)(w, x)

    f = in_loop(jax.value_and_grad(over(stage)))
    result = mpmd_jit_with_loop(f, MpmdMesh(mesh, "stage"))(WEIGHTS, XS)
    assert_close(result, total(jax.value_and_grad(over(centered, lambda x: x))))


def lowered(body: Callable, specs: Any, mapped: Callable | None = None, **options: Any) -> Any:
    mesh = mesh_of(AxisType.Auto)

    def stage(w: Any, x: Any) -> Any:
        here = jax.shard_map(body, mesh=mesh, in_specs=(P(), specs), out_specs=specs, **options)
        return (mapped or here)(w, x)

    return mpmd_jit_with_loop(in_loop(over(stage)), MpmdMesh(mesh, "stage")).lower(WEIGHTS, XS)


def test_a_shard_map_over_groups_is_refused_by_name():
    message = r"is over the axis 'stage' of all groups: `in_specs` has P\(\('stage', 'data'\),\)"
    with pytest.raises(ValueError, match=message):
        lowered(centered_shards, P(("stage", "data")))

    def sums_over_groups(w: Any, x: Any) -> Any:
        return jax.lax.psum(x @ w, "stage")

    with pytest.raises(ValueError, match="'stage' of all groups: Found an unbound axis name"):
        lowered(sums_over_groups, P("data"), check_vma=False)


def test_a_shard_map_that_is_made_outside_of_the_step_is_refused_by_name():
    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    made = jax.shard_map(centered_shards, mesh=mesh_of(AxisType.Auto), **specs)
    with pytest.raises(ValueError, match=r"Call `jax\.shard_map` inside of `fun`"):
        lowered(centered_shards, P("data"), made)
    np.testing.assert_allclose(made(WEIGHTS[0], XS[0]), centered(WEIGHTS[0], XS[0]), atol=1e-6)


# Constraints.


def test_a_constraint_of_a_number_says_nothing():
    def stage(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w) * jax.lax.with_sharding_constraint(2.0, P())

    step = mpmd_jit_with_loop(in_loop(jax.value_and_grad(over(stage))), groups(2, data=2))
    true = total(jax.value_and_grad(over(lambda w, x: 2 * plain(w, x), lambda x: x)))
    assert_close(step(WEIGHTS, XS), true)


# References.


def with_refs(w: Any, x: Any) -> Any:
    """Writes of single rows, in Python and in a loop, also in a nested function."""
    state = jax.new_ref(x)
    state[0] = state[1] * 2

    def turn(i: Any, _: Any) -> None:
        state[i] = jnp.tanh(state[i] @ w)

    jax.jit(lambda: jax.lax.fori_loop(0, len(x), turn, None))()
    return jax.freeze(state)


def without_refs(w: Any, x: Any) -> Any:
    return jnp.tanh(x.at[0].set(2 * x[1]) @ w)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1"])
def test_references_inside_of_stages_are_values(schedule: str):
    step = mpmd_jit_with_loop(in_loop(jax.value_and_grad(over(with_refs)), schedule), groups(2))
    true = total(jax.value_and_grad(over(without_refs, lambda x: x)))
    assert_close(step(WEIGHTS, XS), true)


def test_references_cross_marks_and_are_used_behind_the_loop():
    def loss(weights: Any, x: Any, mark: Callable = mark_stage_end) -> Any:
        state = jax.new_ref(x)
        for w in weights:
            state[...] = mark(jnp.tanh(state[...] @ w))
        return jnp.sum(state[...] ** 2)

    def step(weights: Any, xs: Any) -> Any:
        value, grads = in_loop(jax.value_and_grad(loss))(weights, xs)
        count = jax.new_ref(value)
        count[...] += 1
        return count[...], grads

    value, grads = total(jax.value_and_grad(partial(loss, mark=lambda x: x)))
    assert_close(mpmd_jit_with_loop(step, groups(2))(WEIGHTS, XS), (value + 1, grads))


def test_a_reference_that_microbatches_share_is_refused_by_name():
    def step(weights: Any, xs: Any) -> Any:
        count = jax.new_ref(jnp.zeros(()))

        def loss(x: Any) -> Any:
            count[...] += 1
            return over(plain)(weights, x)

        return treduce(loss, xs, schedule="1f1b", operation=Add), count[...]

    with pytest.raises(ValueError, match="reads or writes to a reference"):
        mpmd_jit_with_loop(step, groups(2)).lower(WEIGHTS, XS)
