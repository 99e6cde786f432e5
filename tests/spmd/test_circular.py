"""The circular pipeline as a layer: what it refuses, what bubbles see, what it moves and keeps."""

import dataclasses
import re
from collections.abc import Iterator
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from harness.contract import Row, circular, make_case, mesh_of, parameters, placed
from jaxpipe import sharding, spmd
from jaxpipe.autodiff import StagedModel, keep
from jaxpipe.schedules.builders import circular_ticks
from jaxpipe.spmd.circular_engine import (
    PipelineShape,
    add_input,
    circular_value_and_grad,
    first_state,
    hand_over,
    last_cotangent,
    next_input,
    realign,
    stream_move,
    take_back,
    work_at,
)
from jaxpipe.spmd.circular_engine import _passes as _circular_passes
from jaxpipe.spmd.ranks import AXIS


def stage(w, x, batch_inputs, rng):
    del rng
    return jnp.tanh(x @ w["w"]) + batch_inputs["bias"], {"size": jnp.sum(jnp.abs(x))}


def problem(ranks, repeats, microbatches, dim=4, rows=3):
    key = jax.random.key(0)
    weights = {"w": jax.random.normal(key, (repeats, ranks, dim, dim))}
    inputs = jax.random.normal(jax.random.fold_in(key, 1), (microbatches, rows, dim))
    batch_inputs = {
        "bias": jax.random.normal(jax.random.fold_in(key, 2), (microbatches, rows, dim))
    }
    return weights, inputs, batch_inputs


def one_after_the_other(weights, inputs, batch_inputs):
    outputs, size = [], 0.0
    for x, bias in zip(inputs, batch_inputs["bias"], strict=True):
        for w in weights["w"].reshape(-1, *weights["w"].shape[2:]):
            x, aux = stage({"w": w}, x, {"bias": bias}, ())
            size += aux["size"]
        outputs.append(x)
    return jnp.stack(outputs), size


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"delay": True},
        pytest.param({"scan_ticks": False}, marks=pytest.mark.slow),
        {"scan_ticks": False, "scan_repeats": False, "delay": True},
    ],
    ids=["loops", "delayed", "ticks unrolled", "all unrolled, delayed"],
)
def test_the_layer_equals_its_stages_one_after_the_other_and_so_do_all_its_gradients(how):
    weights, inputs, batch_inputs = problem(ranks=3, repeats=4, microbatches=6)

    def scalar(layer):
        def of(weights, inputs, batch_inputs):
            y, size = layer(weights, inputs, batch_inputs)
            return jnp.sum(jnp.sin(y)) + 1e-2 * size

        return jax.jit(jax.grad(of, argnums=(0, 1, 2)))

    def layer(weights, inputs, batch_inputs):
        y, aux = spmd.circular(stage, weights, inputs, batch_inputs, **how)
        return y, aux["size"]

    got = scalar(layer)(weights, inputs, batch_inputs)
    wanted = scalar(one_after_the_other)(weights, inputs, batch_inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, wanted)


def test_activations_may_be_any_pytree_with_integers_in_it():
    def count(w, x, batch_inputs, rng):
        return {"x": x["x"] * w, "visited": x["visited"] + 1, "on": ~x["on"]}, {}

    inputs = {
        "x": jnp.ones((4, 2)),
        "visited": jnp.zeros((4,), jnp.int32),
        "on": jnp.zeros((4,), bool),
    }
    y, _ = spmd.circular(count, jnp.full((3, 2), 2.0), inputs)
    np.testing.assert_array_equal(y["x"], np.full((4, 2), 64.0))
    np.testing.assert_array_equal(y["visited"], [6, 6, 6, 6])
    np.testing.assert_array_equal(y["on"], [False] * 4)


BUBBLES = [
    Row(
        "circular",
        "llama",
        ranks,
        repeats,
        2 * ranks,
        delay=delay,
        packed=True,
        tied=True,
        job="test" if (ranks, delay) in ((2, False), (3, True)) else "slow",
    )
    for ranks, repeats in ((3, 1), (2, 2), (4, 2))
    for delay in (False, True)
]


@pytest.mark.parametrize("row", parameters(BUBBLES))
def test_nobody_reads_what_a_bubble_computes(row, monkeypatch):
    """NaN in place of every result of a bubble: the loss and all gradients stay, bit for bit."""
    clean = circular(row, make_case(row))
    shape = PipelineShape(row.ranks, row.repeats, row.microbatches, 2 if row.delay else 1)

    def poisoned(state, y, t, **how):
        busy = work_at(t, shape).busy
        return hand_over(state, jnp.where(busy, y, jnp.nan), t, **how)

    monkeypatch.setattr(_circular_passes, "hand_over", poisoned)
    jax.tree.map(np.testing.assert_array_equal, circular(row, make_case(row)), clean)


def test_buffers_are_poisoned_before_they_are_written():
    inputs = {"x": jnp.ones((2, 3)), "n": jnp.ones((2,), jnp.int32)}

    def first(inputs):
        return first_state(inputs, PipelineShape(2, 2, 4, 2))

    state = jax.vmap(first, axis_name=AXIS)(jax.tree.map(lambda x: jnp.stack([x, x]), inputs))
    for buffer in (state.storage, *state.in_flight):
        assert np.isnan(buffer["x"]).all()
        assert (np.asarray(buffer["n"]) == np.iinfo(np.int32).max).all()
    assert len(state.in_flight) == 1


@pytest.mark.parametrize(
    "shape",
    [
        PipelineShape(3, 2, 6),
        PipelineShape(2, 3, 2),  # the storage has one slot
        PipelineShape(4, 1, 8),
        PipelineShape(1, 2, 3),
        PipelineShape(2, 2, 6, 2),
        PipelineShape(3, 1, 3, 2),
    ],
)
def test_the_movements_of_all_ticks_are_transposed_as_jax_does(shape):
    ticks = range(shape.num_ticks)
    parts = shape.num_ranks, shape.microbatches_per_rank, 4
    inputs, doutputs = jax.random.normal(jax.random.key(0), (2, *parts))

    def move(t):
        return stream_move(jnp.int32(t), shape, ticks)

    def forward(inputs, added):
        state = first_state(inputs, shape)
        for t in ticks:
            x = next_input(state, t, from_stream=work_at(t, shape).from_stream)
            state = hand_over(state, (t + 2) * x + added[t], t, move=move(t))
        return realign(state.stream, shape)

    def backward(doutputs):
        state, dys = last_cotangent(doutputs, shape), []
        for t in reversed(ticks):
            state, dy = take_back(state, t, move=move(t))
            state = add_input(state, (t + 2) * dy, t, work=work_at(t, shape), hint="")
            dys.insert(0, dy)
        return state.stream, jnp.stack(dys)

    def both(inputs, doutputs):
        added = jnp.zeros((shape.num_ticks, 4))
        return backward(doutputs), jax.vjp(forward, inputs, added)[1](doutputs)

    mine, jaxs = jax.vmap(both, axis_name=AXIS)(inputs, doutputs)
    assert all(jnp.any(x) for x in mine)
    jax.tree.map(np.testing.assert_array_equal, mine, jaxs)


def scans(jaxpr) -> Iterator:
    """Every scan of a jaxpr, at any depth."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from scans(inner)


def count(jaxpr, name) -> int | Fraction:
    """How often a primitive runs: lengths of scans and shares of conditions are applied."""
    total = 0
    for eqn in jaxpr.eqns:
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        if eqn.primitive.name == "cond":
            share = re.search(r"taken_(\d+)_of_(\d+)", str(eqn.source_info.name_stack))
            times = Fraction(int(share[1]), int(share[2])) if share else 1
        inner = sum(count(j, name) for j in jaxprs_in_params(eqn.params))
        total += (eqn.primitive.name == name) + times * inner
    return total


# Of 8 microbatches on 4 ranks 6 begin on another rank than 0, and 6 end on another than 3.
@pytest.mark.parametrize(("repeats", "moves"), [(1, 11), (2, 6 + 6), (3, 6 + 6)])
def test_one_permute_per_tick_and_one_more_only_while_inputs_or_results_move(repeats, moves):
    weights, inputs, batch_inputs = problem(ranks=4, repeats=repeats, microbatches=8)
    mesh = sharding.make_mesh({"stage": 4}, devices=jax.devices()[:4])

    def layer(weights, inputs, batch_inputs):
        return spmd.circular(stage, weights, inputs, batch_inputs, mesh=mesh)[0]

    jaxpr = jax.make_jaxpr(layer)(weights, inputs, batch_inputs).jaxpr
    assert count(jaxpr, "ppermute") == circular_ticks(4, repeats, 8) + moves


def test_gradients_of_what_ranks_share_are_summed_once_and_not_in_every_microbatch():
    row = Row("circular", "llama", ranks=2, repeats=2, microbatches=8, axes=(), tied=True)
    case, mesh = make_case(row), mesh_of(row)

    def run(weights):
        return circular_value_and_grad(case.model, weights, case.batch_inputs, mesh=mesh)

    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(run)(case.weights).jaxpr
    shared = len(jax.tree.leaves([case.weights["embed"], case.weights["head"]]))
    results = 2  # the loss and the accuracy
    assert count(jaxpr, "psum_invariant") == shared + results


def test_ranks_exchange_nothing_but_permutes_and_sums():
    row = Row("circular", "mlp", ranks=4, repeats=2, microbatches=8, axes=())
    case, mesh = make_case(row), mesh_of(row)

    def run(weights, batch_inputs):
        return circular_value_and_grad(case.model, weights, batch_inputs, mesh=mesh, keys=())

    with jax.set_mesh(mesh):
        text = jax.jit(run).lower(placed(case, mesh), case.batch_inputs).compile().as_text() or ""
    assert "collective-permute" in text
    assert "all-gather" not in text
    assert "all-to-all" not in text


def test_the_backward_finds_one_input_per_tick_and_no_weights():
    # 19 ticks, and nothing else has 19 in dim 0.
    weights, inputs, batch_inputs = problem(ranks=2, repeats=3, microbatches=6, dim=64, rows=1)
    mesh = sharding.make_mesh({"stage": 2}, devices=jax.devices()[:2])

    def loss(weights):
        return jnp.sum(spmd.circular(stage, weights, inputs, batch_inputs, mesh=mesh)[0])

    jaxpr = jax.make_jaxpr(jax.grad(loss))(weights).jaxpr
    loops = list(scans(jaxpr))
    assert len(loops) == 2  # all ticks, and back
    kept = {v.aval.shape for loop in loops for v in loop.outvars if v.aval.shape[:1] == (19,)}
    assert kept == {(19, 1, 64)}


def test_weights_are_no_residuals_even_if_nothing_is_recomputed():
    weights, inputs, batch_inputs = problem(ranks=2, repeats=3, microbatches=6, dim=64, rows=1)

    def cast_first(w, x, batch_inputs, rng):
        return stage({"w": w["w"].astype(jnp.bfloat16).astype(jnp.float32)}, x, batch_inputs, rng)

    def loss(weights):
        return jnp.sum(spmd.circular(cast_first, weights, inputs, batch_inputs, remat=keep)[0])

    jaxpr = jax.make_jaxpr(jax.grad(loss))(weights).jaxpr
    kept = [v.aval.shape for loop in scans(jaxpr) for v in loop.outvars]
    kept = [shape for shape in kept if 19 in shape[:2]]
    assert kept
    assert all(shape[-2:] != (64, 64) for shape in kept)


@pytest.mark.parametrize(
    ("ranks", "repeats", "microbatches", "delay", "message"),
    [
        (4, 1, 2, False, "There are 2 microbatches for 4 ranks"),
        (4, 1, 6, False, "There are 6 microbatches, not a multiple of the 4 ranks"),
        (4, 2, 4, True, "There are 4 microbatches, but with delayed forwarding .* at least 8"),
    ],
)
def test_counts_that_do_not_fit_are_refused(ranks, repeats, microbatches, delay, message):
    weights, inputs, batch_inputs = problem(ranks, repeats, microbatches)
    with pytest.raises(ValueError, match=message):
        spmd.circular(stage, weights, inputs, batch_inputs, delay=delay)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"batch_inputs": {"bias": jnp.ones((2, 3, 4))}},
            r"inputs has shape \(8, 3, 4\) and batch_inputs\['bias'\] \(2, 3, 4\)",
        ),
        ({"keys": jnp.ones((1, 4))}, r"weights\['w'\] has shape \(2, 4, 4, 4\) and keys \(1, 4\)"),
        ({"weights": jnp.ones((2,))}, r"weights has shape \(2,\).* \[repeats, ranks, \.\.\.\]"),
        ({"weights": {}}, "`weights` and `keys` have no arrays"),
    ],
)
def test_leaves_that_disagree_about_the_counts_are_refused(changes, message):
    weights, inputs, batch_inputs = problem(ranks=4, repeats=2, microbatches=8)
    arguments = {"weights": weights, "inputs": inputs, "batch_inputs": batch_inputs} | changes
    with pytest.raises(ValueError, match=message):
        spmd.circular(stage, **arguments)


def test_a_mesh_of_another_size_is_refused():
    weights, inputs, batch_inputs = problem(4, 1, 4)
    mesh = sharding.make_mesh({"stage": 2}, devices=jax.devices()[:2])
    message = r"weights\['w'\] has shape \(1, 4, 4, 4\).*4 ranks, but the axis 'stage' of .* has 2"
    with pytest.raises(ValueError, match=message):
        spmd.circular(stage, weights, inputs, batch_inputs, mesh=mesh)
    plain = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    with pytest.raises(ValueError, match=r"`mesh` has the axes \('data',\)"):
        spmd.circular(stage, weights, inputs, batch_inputs, mesh=plain)


def test_weights_without_the_repeats_dim_are_told_how_to_get_it():
    _, inputs, batch_inputs = problem(4, 1, 4)
    mesh = sharding.make_mesh({"stage": 4}, devices=jax.devices()[:4])
    of_ranks = {"w": jnp.zeros((4, 8, 8))}
    message = (
        r"has shape \(4, 8, 8\).*repeats are missing: give `w\[None\]`, of shape \(1, 4, 8, 8\)"
    )
    with pytest.raises(ValueError, match=message):
        spmd.circular(stage, of_ranks, inputs, batch_inputs, mesh=mesh)
    of_stages = {"w": jnp.zeros((8, 6, 6))}
    message = r"give `w.reshape\(2, 4, \*w.shape\[1:\]\)`, of shape \(2, 4, 6, 6\)"
    with pytest.raises(ValueError, match=message):
        spmd.circular(stage, of_stages, inputs, batch_inputs, mesh=mesh)


def test_a_stage_that_changes_the_shape_of_activations_is_refused():
    weights, inputs, batch_inputs = problem(2, 1, 2)
    with pytest.raises(ValueError, match=r"`stage` was given .* and returned"):
        spmd.circular(lambda w, x, batch_inputs, rng: (x[:1], {}), weights, inputs, batch_inputs)
    with pytest.raises(ValueError, match=r"float32\[3, 4\], float32\[3, 4\].*It must return y"):
        spmd.circular(lambda w, x, batch_inputs, rng: (x, x), weights, inputs, batch_inputs)


def test_a_stage_without_aux_may_return_its_activation_alone():
    weights, inputs, batch_inputs = problem(2, 2, 4)
    wanted = spmd.circular(lambda *given: (stage(*given)[0], {}), weights, inputs, batch_inputs)
    for alone in (lambda *given: stage(*given)[0], lambda *given: (stage(*given)[0], None)):
        got = spmd.circular(alone, weights, inputs, batch_inputs)
        assert got[1] == wanted[1] == {}
        np.testing.assert_array_equal(got[0], wanted[0])
    pair = jax.eval_shape(
        lambda x: spmd.circular(lambda w, x, *_: x, weights, (x, {"a": x})), inputs
    )
    assert pair[0][1]["a"].shape == inputs.shape


def test_one_name_for_two_metrics_is_refused():
    row = Row("circular", "mlp", ranks=2, repeats=1, microbatches=2)
    case = make_case(row)

    def loss(boundary, x, batch_inputs):
        value, _ = case.model.loss(boundary, x, batch_inputs)
        return value, {"hidden": value}

    model = dataclasses.replace(case.model, loss=loss)
    assert isinstance(model, StagedModel)
    with pytest.raises(ValueError, match=r"both return \['hidden'\]"):
        circular_value_and_grad(model, case.weights, case.batch_inputs)


@pytest.mark.parametrize(
    ("on_mesh", "message"),
    [
        (True, r"\['batch_inputs'\]\['bias'\] has dims \(2, 3, 4\). Dim 1 must hold rows"),
        (False, "`mesh` is None"),
    ],
)
def test_rows_that_devices_cannot_share_are_refused(on_mesh, message):
    weights, inputs, batch_inputs = problem(2, 1, 2)
    mesh = sharding.make_mesh({"stage": 2, "fsdp": 2}, devices=jax.devices()[:4])
    gather = spmd.gather_weights(
        {"w": (None, None)}, sharding.DEFAULT_RULES, when="once", batch_axes=("fsdp",)
    )
    with pytest.raises(ValueError, match=message):
        spmd.circular(
            stage, weights, inputs, batch_inputs, mesh=mesh if on_mesh else None, gather=gather
        )
