"""The engine `scheduled`: what its program holds and computes, and what it refuses."""

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Var

from harness.contract import Row, check_result, make_case, plain, reference, run_ticks, ticks_of
from jaxpipe import schedules, spmd
from jaxpipe.autodiff import StagedModel
from jaxpipe.ir.graph import all_equations
from jaxpipe.schedules import language, lock_step
from jaxpipe.spmd.scheduled_engine import scheduled_value, scheduled_value_and_grad

S, D = 4, 64


def identity(microbatches: int, **shapes: int) -> tuple[dict, dict, StagedModel]:
    """A model whose activations are large and whose weights are small: [D] scales."""
    weights = {
        "embed": {"scale": jnp.ones(D)},
        "stages": {"scale": jnp.ones((shapes.get("chunks", 1), S, D))},
        "head": {"scale": jnp.ones(D)},
    }
    batch_inputs = {"x": jnp.ones((microbatches, 256, D))}
    model = StagedModel(
        embed=lambda w, batch_inputs: batch_inputs["x"] * w["scale"],
        stage=lambda w, x, batch_inputs, rng: (jnp.tanh(x * w["scale"]), {}),
        loss=lambda boundary, y, batch_inputs: (jnp.sum(y * boundary["head"]["scale"]), {}),
    )
    return weights, batch_inputs, model


@functools.cache
def compiled(name: str, microbatches: int) -> Any:
    weights, batch_inputs, model = identity(microbatches)
    mesh = jax.make_mesh((S,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
    ticks = lock_step.to_lock_step(schedules.build(name, ranks=S, microbatches=microbatches))
    run = functools.partial(scheduled_value_and_grad, model, ticks=ticks, mesh=mesh)
    return jax.jit(run).lower(weights, batch_inputs).compile()


ACTIVATION = 256 * D * 4
"""Bytes."""


def held(name: str, microbatches: int) -> float:
    """Temporaries of the compiled program, in activations."""
    return compiled(name, microbatches).memory_analysis().temp_size_in_bytes / ACTIVATION


def test_one_forward_one_backward_holds_the_same_for_any_number_of_microbatches():
    few, many = held("1f1b", 8), held("1f1b", 64)
    assert many - few < 1
    assert few < 2 * (2 * (S - 1) + 1) + 16


def test_gpipe_holds_more_for_every_microbatch():
    # A stage's input and, on the last rank, the cotangent of its output.
    assert held("gpipe", 64) - held("gpipe", 8) == pytest.approx(2 * (64 - 8), rel=0.05)


def test_the_program_does_not_grow_with_ticks():
    def instructions(microbatches: int) -> int:
        return compiled("1f1b", microbatches).as_text().count("\n")

    assert abs(instructions(64) - instructions(8)) <= 0.02 * instructions(8)


def test_dualpipe_exchanges_weights_once_and_gradients_once():
    """Besides the hand-overs of both directions, of activations and of cotangents."""
    text = compiled("dualpipe", 8).as_text()
    assert text.count(" collective-permute(") == 2 + 2 + 1 + 1
    assert compiled("1f1b", 8).as_text().count(" collective-permute(") == 2


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_h1", "zbv"])
def test_buffers_that_a_branch_changes_have_one_reader(name: str):
    """XLA:TPU moves a second one into the branches, which then return a copy of the buffer."""
    chunks = 2 if name == "zbv" else 1
    weights, batch_inputs, model = identity(8, chunks=chunks)
    stage = lambda w, x, batch_inputs, rng: (jnp.tanh(x @ jnp.diag(w["scale"])), {})  # noqa: E731
    model = StagedModel(model.embed, stage, model.loss)
    mesh = jax.make_mesh((S,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
    ticks = lock_step.to_lock_step(schedules.build(name, ranks=S, microbatches=8))
    run = functools.partial(scheduled_value_and_grad, model, ticks=ticks, mesh=mesh)
    loops = [
        eqn.params["jaxpr"].jaxpr
        for eqn in all_equations(jax.make_jaxpr(run)(weights, batch_inputs))
        if eqn.primitive.name == "scan"
    ]
    num_buffers = 0
    for loop in loops:
        readers = Counter(v for eqn in loop.eqns for v in eqn.invars if isinstance(v, Var))
        readers.update(v for v in loop.outvars if isinstance(v, Var))
        changed = [v for eqn in loop.eqns if eqn.primitive.name == "cond" for v in eqn.outvars]
        buffers = [v for v in changed if v.aval.shape[1:] == (256, D)]
        num_buffers += len(buffers)
        assert {readers[buffer] for buffer in buffers} <= {1}
    assert num_buffers


def test_an_idle_rank_computes_nothing():
    weights, batch_inputs, model = identity(4)
    mesh = jax.make_mesh((S,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
    ticks = lock_step.to_lock_step(schedules.build("1f1b", ranks=S, microbatches=4))
    seen = []

    def stage(w, x, batch_inputs, rng):
        jax.debug.callback(lambda _: seen.append(1), x[0, 0])
        return jnp.tanh(x * w["scale"]), {}

    counted = StagedModel(model.embed, stage, model.loss)
    forward = lock_step.to_lock_step(language.forward_only(ticks.schedule))
    run = functools.partial(scheduled_value, counted, ticks=forward, mesh=mesh)
    jax.block_until_ready(jax.jit(run)(weights, batch_inputs))
    jax.effects_barrier()
    assert len(seen) == S * 4


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_value_alone_is_that_of_the_whole(name):
    row = Row("scheduled", "mlp", 3, 2 if name == "zbv" else 1, 6, schedule=name, dropout=0.1)
    case, ticks = make_case(row), ticks_of(row)
    forward = lock_step.to_lock_step(language.forward_only(ticks.schedule))

    def to_ranks(tree: Any) -> Any:
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)
        return spmd.to_ranks(flat, ticks.schedule)

    weights = case.weights | {"stages": to_ranks(case.weights["stages"])}
    run = functools.partial(scheduled_value, case.model, ticks=forward)
    loss, metrics = jax.jit(run)(weights, case.batch_inputs, to_ranks(case.keys))
    (true_loss, true_metrics), _ = reference(plain(row))
    assert loss == pytest.approx(true_loss, rel=1e-5)
    for metric, value in metrics.items():
        assert value == pytest.approx(true_metrics[metric], rel=1e-5)


def test_a_lean_grid_is_as_exact_as_a_fast_one():
    row = Row("scheduled", "mlp", 3, 1, 6, schedule="1f1b", tied=True)
    lean = lock_step.to_lock_step(schedules.build("1f1b", ranks=3, microbatches=6), spare=0)
    assert schedules.peak_activations(lean.schedule) == (3, 2, 1)
    check_result(row, run_ticks(row, make_case(row), lean))


def refused(message: str, *, microbatches: int = 4, ticks: Any = None, **options: Any) -> None:
    weights, batch_inputs, model = identity(microbatches, chunks=options.pop("chunks", 1))
    ticks = ticks or lock_step.to_lock_step(schedules.build("1f1b", ranks=S, microbatches=4))
    with pytest.raises(ValueError, match=message):
        scheduled_value_and_grad(model, weights, batch_inputs, ticks=ticks, **options)


def test_counts_that_disagree_are_refused():
    refused("`batch_inputs` has 8 microbatches, and `ticks` is a schedule of 4", microbatches=8)
    refused(r"begin with \(2, 4\).* `ticks` is a schedule of \(1, 4\)", chunks=2)
    mesh = jax.make_mesh((2,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
    refused("`ticks` is a schedule of 4 ranks, but the axis 'stage'", mesh=mesh)


def test_windows_for_halves_of_backwards_are_refused():
    ticks = lock_step.to_lock_step(schedules.build("zero_bubble_h1", ranks=S, microbatches=4))
    refused("the schedule has W apart from I", ticks=ticks, gather=spmd.Gather("repeat"))


def test_a_head_that_cannot_be_shared_is_refused():
    options = spmd.EngineOptions(vocab_parallel=True)
    refused("`vocab_parallel` is True and `model.vocab_parallel_loss` None", options=options)


def test_a_value_alone_takes_forwards_alone():
    weights, batch_inputs, model = identity(4)
    ticks = lock_step.to_lock_step(schedules.build("1f1b", ranks=S, microbatches=4))
    with pytest.raises(ValueError, match="`ticks` has backwards"):
        scheduled_value(model, weights, batch_inputs, ticks=ticks)
