"""Where marks may stand, and what is said of those that stand elsewhere."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe.mpmd import MpmdMesh, mark_stage_end, mpmd_jit_with_loop, treduce
from jaxpipe.mpmd.jaxpp import GPipe, Interleaved1F1B, Std1F1B, ZeroBubble, pipeline_enter_stage
from mpmd.small import (
    assert_close,
    assert_equal,
    batch,
    compare,
    gradients,
    groups,
    layer,
    layers,
    squared_error,
)


def marked(w: Any, x: Any) -> Any:
    return mark_stage_end(layer(w, x))


def in_jit(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jax.jit(marked)(w, x)
    return x


def in_checkpoint(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jax.checkpoint(marked)(w, x)
    return x


def in_checkpoint_of_jit(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jax.checkpoint(jax.jit(marked))(w, x)
    return x


def several_stages_in_one_checkpoint(weights: Any, x: Any) -> Any:
    half = len(weights) // 2
    x = jax.checkpoint(in_jit)(weights[:half], x)
    return jax.checkpoint(in_jit)(weights[half:], x)


def all_stages_in_one_checkpoint(weights: Any, x: Any) -> Any:
    return jax.checkpoint(in_jit)(weights, x)


def checkpoints_in_a_checkpoint(weights: Any, x: Any) -> Any:
    return jax.checkpoint(in_checkpoint)(weights, x)


PLACES = (
    in_jit,
    in_checkpoint,
    in_checkpoint_of_jit,
    several_stages_in_one_checkpoint,
    all_stages_in_one_checkpoint,
    checkpoints_in_a_checkpoint,
)


@pytest.mark.parametrize("schedule", [Std1F1B(4), ZeroBubble(2)], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("stages", PLACES)
def test_marks_inside_jit_and_inside_checkpoint(stages: Callable, schedule: Any):
    def loss(weights: Any, x: Any, y: Any) -> Any:
        return squared_error(stages(weights, x), y)

    ranks = schedule.mpmd_dim
    compare(gradients(schedule, loss), groups(ranks), layers(ranks), *batch(ranks))


def test_marks_inside_a_checkpoint_around_the_loss():
    def loss(weights: Any, x: Any, y: Any) -> Any:
        return squared_error(in_jit(weights, x), y)

    compare(gradients(Std1F1B(3), jax.checkpoint(loss)), groups(3), layers(3), *batch(4))


def test_the_loop_may_stand_inside_jit():
    step = jax.jit(gradients(Std1F1B(2)))
    compare(lambda *args: step(*args)[1], groups(2), layers(2), *batch(3))


def test_the_mark_behind_the_last_stage_may_be_left_out():
    """The same programs, to the last bit."""

    def losses(mark_last: bool) -> Callable:
        def loss(weights: Any, x: Any, y: Any) -> Any:
            x = in_jit(weights[:-1], x)
            x = (marked if mark_last else layer)(weights[-1], x)
            return squared_error(x, y)

        return loss

    args = layers(3), *batch(3)
    results = [
        compare(gradients(Std1F1B(3), losses(mark_last)), groups(3), *args)
        for mark_last in (False, True)
    ]
    assert_equal(*results)


def test_a_mark_takes_trees_and_pipeline_enter_stage_a_name():
    def loss(weights: Any, x: Any, y: Any) -> Any:
        more = [jnp.sin(x), x @ weights[0]["in"]]
        tree = mark_stage_end({"x": layer(weights[0], x), "more": more})
        x = layer(weights[1], tree["x"] + tree["more"][0]) + tree["more"][1][:, :8]
        return squared_error(pipeline_enter_stage(x, name="the loss"), y)

    compare(gradients(ZeroBubble(2), loss), groups(2), layers(2), *batch(3))


def test_marks_compute_nothing_outside_of_a_pipeline():
    w, (xs, _) = layers(1)[0], batch(1)
    assert_equal(marked(w, xs[0]), layer(w, xs[0]))
    assert_equal(jax.vmap(marked, (None, 0))(w, xs), jax.vmap(layer, (None, 0))(w, xs))
    tangents = jax.jvp(marked, (w, xs[0]), (w, xs[0])), jax.jvp(layer, (w, xs[0]), (w, xs[0]))
    assert_equal(*tangents)
    assert mark_stage_end(()) == ()


# Errors.


def run(loss: Callable, schedule: Any, ranks: int, stages: int = 2) -> Any:
    step = mpmd_jit_with_loop(gradients(schedule, loss), groups(ranks))
    return step.lower(layers(stages), *batch(2))


def without_marks(weights: Any, x: Any, y: Any) -> Any:
    for w in weights:
        x = layer(w, x)
    return squared_error(x, y)


def marked_in_a_scan(weights: Any, x: Any, y: Any) -> Any:
    stacked = jax.tree.map(lambda *w: jnp.stack(w), *weights)
    return squared_error(lax.scan(lambda x, w: (marked(w, x), None), x, stacked)[0], y)


def marked_in_a_cond(weights: Any, x: Any, y: Any) -> Any:
    x = lax.cond(x[0, 0] > 0, lambda x: marked(weights[0], x), lambda x: x, x)
    return squared_error(layer(weights[1], x), y)


def marked_loss(weights: Any, x: Any, y: Any) -> Any:
    return squared_error(in_jit(weights, x), y)


def test_a_stage_without_a_mark():
    message = (
        "The loop has 0 marks where stages end, and its schedule 2 stages. Mark the end of every "
        "stage but the last (1 marks), or of all of them (2)."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        run(without_marks, Std1F1B(2), 2)
    with pytest.raises(ValueError, match="has 2 marks where stages end, and its schedule 4"):
        run(marked_loss, Interleaved1F1B(4, 2), 2)


def test_a_mark_too_many():
    with pytest.raises(ValueError, match="has 3 marks where stages end, and its schedule 2 stages"):
        run(marked_loss, Std1F1B(2), 2, stages=3)


def test_marks_outside_of_a_loop():
    step = mpmd_jit_with_loop(lambda weights, x, y: marked_loss(weights, x[0], y[0]), groups(2))
    with pytest.raises(ValueError, match="A stage is marked outside of a loop over microbatches"):
        step.lower(layers(2), *batch(2))


@pytest.mark.parametrize(
    ("loss", "what"), [(marked_in_a_scan, "lax.scan"), (marked_in_a_cond, "lax.cond")]
)
def test_a_mark_inside_of_a_loop_or_a_choice_of_a_stage(loss: Callable, what: str):
    with pytest.raises(ValueError, match=f"A stage ends inside `{what}` within a stage"):
        run(loss, Std1F1B(2), 2)


def test_a_schedule_of_another_size_than_the_mesh():
    message = "The schedule is for 2 ranks, and the mesh has 4 groups. Give as many of one as"
    with pytest.raises(ValueError, match=message):
        run(marked_loss, GPipe(2), 4)


def test_a_spec_over_the_axis_of_groups_divides_nothing_and_says_so(caplog):
    """As in JaxPP, whose scripts give the specs of weights on all devices."""
    mesh, specs = groups(2, fsdp=2), [{"in": P(("stage", "fsdp")), "out": P(None, "stage")}] * 2
    step = mpmd_jit_with_loop(
        gradients(Std1F1B(2)), mesh, in_specs=(specs, None, None), out_specs=(P(), specs)
    )
    args = layers(2), *batch(2)
    found = step(*args)
    assert_close(found, jax.jit(gradients(Std1F1B(2)))(*args))
    assert [x.spec for x in jax.tree.leaves(found[1])] == [P("fsdp"), P(None, None)] * 2
    said = [record.message for record in caplog.records if record.name == "jaxpipe.mpmd"]
    assert said[0].startswith(
        "`in_specs[0][0]['in']` has the spec P(('stage', 'fsdp'),). Within a group 'stage' has size"
    )
    assert any(message.startswith("`out_specs[1][0]['out']` has the spec") for message in said)


def test_a_constraint_over_the_axis_of_groups():
    def loss(weights: Any, x: Any, y: Any) -> Any:
        return marked_loss(weights, lax.with_sharding_constraint(x, P("stage")), y)

    with pytest.raises(ValueError, match="`with_sharding_constraint` inside a stage has the spec"):
        run(loss, Std1F1B(2), 2).compile()


def test_specs_that_do_not_fit_their_tree():
    message = r"`in_specs` is a tuple of 2 .* and the value that it describes is a tuple of 3"
    with pytest.raises(ValueError, match=message):
        mpmd_jit_with_loop(gradients(Std1F1B(2)), groups(2), in_specs=(P(), P())).lower(
            layers(2), *batch(2)
        )


def test_manual_axes():
    mesh = Mesh(jax.devices()[:2], "stage", axis_types=(AxisType.Manual,))
    with pytest.raises(ValueError, match=r"The axes \['stage'\] of `jax_mesh` are manual"):
        MpmdMesh(mesh, "stage")


def test_an_axis_that_is_not_there():
    with pytest.raises(ValueError, match="`mpmd_axis_name` is 'pipeline', and the mesh has"):
        MpmdMesh(groups(2).jax_mesh, "pipeline")


def test_groups_that_are_not_there():
    with pytest.raises(ValueError, match=r"`mpmd_indices` is \(1, 2\), and the mesh has the g"):
        groups(2).mpmd_submesh([1, 2])


def test_microbatches_that_disagree():
    with pytest.raises(ValueError, match=r"arrays whose first dims are \[\(2,\), \(3,\)\]"):
        treduce(lambda x: x, (jnp.ones(2), jnp.ones(3)), schedule=GPipe(2))
    with pytest.raises(ValueError, match=r"`operation` has .add.\. Give Add, Max, Concat"):
        treduce(lambda x: x, jnp.ones(2), schedule=GPipe(2), operation="add")
