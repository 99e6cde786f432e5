"""Functions without a loop: each group runs what stands between two marks."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpipe.mpmd import MpmdArray, mpmd_jit_by_yield
from jaxpipe.mpmd.jaxpp import pipeline_enter_stage
from mpmd.small import assert_close, assert_equal, batch, groups, layer, layers, runs, squared_error

STAGES = 3


def forward(weights: Any, x: Any) -> Any:
    for i, w in enumerate(weights):
        x = layer(w, x)
        if i < STAGES - 1:
            x = pipeline_enter_stage(x, name=f"stage {i + 1}")
    return x


def loss(weights: Any, x: Any, y: Any) -> Any:
    return squared_error(forward(weights, x), y)


def step(weights: Any, x: Any, y: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(weights, x, y)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def one_batch() -> tuple[Any, Any]:
    xs, ys = batch(1, 4)
    return xs[0], ys[0]


def test_mpmd_jit_by_yield_runs_a_stage_on_each_group():
    x, _ = one_batch()
    pipelined = mpmd_jit_by_yield(forward, groups(STAGES))
    out = pipelined(layers(STAGES), x)
    assert_equal(out, jax.jit(forward)(layers(STAGES), x))
    assert out.mpmd_idxs == (STAGES - 1,)
    program = pipelined.lower(layers(STAGES), x).program
    found = [(i.rank, i.name) for i in runs(program) if i.actions]
    assert found == [(rank, f"fwd_{rank}__0") for rank in range(STAGES)]
    assert [ranks for _, ranks in program.inputs] == [(0,), (0,), (1,), (1,), (2,), (2,), (0,)]


@pytest.mark.parametrize("axes", [{}, {"fsdp": 2}], ids=["one_device", "fsdp2"])
def test_mpmd_jit_by_yield_of_a_training_step(axes: dict[str, int]):
    """Backwards run in turn as well, and every stage is updated on its own group."""
    specs = [{"in": P(*axes), "out": P(None, *axes)}] * STAGES
    pipelined = mpmd_jit_by_yield(
        step, groups(STAGES, **axes), in_specs=(specs, None, None), out_specs=(specs, None)
    )
    weights: Any = layers(STAGES)
    true, data = weights, one_batch()
    for _ in range(3):
        weights, value = pipelined(weights, *data)
        true, true_value = jax.jit(step)(true, *data)
        assert_close((weights, value), (true, true_value))
    assert [w["in"].mpmd_idxs for w in weights] == [(0,), (1,), (2,)]
    for of_stage, spec in zip(weights, specs, strict=True):
        assert {name: w.spec for name, w in of_stage.items()} == spec
    program = pipelined.lower(weights, *data).program
    names = [i.name for i in runs(program) if i.actions]
    assert names == [
        "fwd_0__0",
        "fwd_1__0",
        "FusedTask(fwd_2__0, bwd_2__0)",
        "bwd_1__0",
        "bwd_0__0",
    ]


def test_mpmd_jit_by_yield_with_donated_and_static_arguments():
    def scaled(weights: Any, power: int, x: Any, y: Any) -> Any:
        new, value = step(weights, x, y)
        return new, value**power

    pipelined = mpmd_jit_by_yield(
        scaled, groups(STAGES), donate_argnums=0, static_argnums=1, out_specs=(P(), P())
    )
    weights, data = layers(STAGES), one_batch()
    first, _ = pipelined(weights, 1, *data)
    assert all(isinstance(w, MpmdArray) for w in jax.tree.leaves(first))
    second, value = pipelined(first, 2, *data)
    assert all(w.is_deleted() for w in jax.tree.leaves(first))
    plain = jax.jit(scaled, static_argnums=1)
    true = plain(plain(layers(STAGES), 1, *data)[0], 2, *data)
    assert_close((second, value), true)


def test_mpmd_jit_by_yield_needs_a_stage_for_every_group():
    message = "has 2 marks where stages end, and its schedule 4 stages"
    with pytest.raises(ValueError, match=message):
        mpmd_jit_by_yield(forward, groups(4)).lower(layers(STAGES), one_batch()[0])


def test_mpmd_jit_by_yield_of_results_that_need_early_stages_only():
    """Later groups have nothing to do then; gradients come from the same groups as results."""

    def early(weights: Any, x: Any) -> Any:
        def value(weights: Any) -> Any:
            y = first = x
            for i, w in enumerate(weights):
                y = pipeline_enter_stage(layer(w, y))
                first = y if i == 0 else first
            return (first**2).mean()

        return jax.value_and_grad(value)(weights)

    args = layers(STAGES), one_batch()[0]
    pipelined = mpmd_jit_by_yield(early, groups(STAGES))
    assert_close(pipelined(*args), jax.jit(early)(*args))
    program = pipelined.lower(*args).program
    assert {i.rank for i in runs(program) if i.actions} == {0, 1}


def test_mpmd_jit_by_yield_of_constants_and_of_arguments_that_pass_through():
    """An argument that passes through stays on its group and is not copied."""

    def passing(weights: Any, x: Any) -> Any:
        return forward(weights, x), weights, x, 3, 1.5

    args = layers(STAGES), one_batch()[0]
    pipelined = mpmd_jit_by_yield(passing, groups(STAGES))
    result = pipelined(*args)
    assert_close(result, jax.jit(passing)(*args))
    assert [w["in"].mpmd_idxs for w in result[1]] == [(0,), (1,), (2,)]

    def only_passing(weights: Any, x: Any) -> Any:
        forward(weights, x)
        return weights, 2

    assert_close(mpmd_jit_by_yield(only_passing, groups(STAGES))(*args), (args[0], jnp.int32(2)))
