"""Groups of several devices: their arrays are divided, and XLA divides their programs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpipe.mpmd import mark_stage_end, mpmd_jit_with_loop
from jaxpipe.mpmd.jaxpp import DualPipeV, Std1F1B, ZeroBubble
from mpmd.small import assert_close, batch, gradients, groups, layers, squared_error, training

AXES = {
    "fsdp2": {"fsdp": 2, "tensor": 1},
    "tensor2": {"fsdp": 1, "tensor": 2},
    "fsdp2xtensor2": {"fsdp": 2, "tensor": 2},
    "fsdp4": {"fsdp": 4, "tensor": 1},
}
SPEC = {"in": P("fsdp", "tensor"), "out": P("tensor", "fsdp")}
ROWS = 4


def constrained(w: Any, x: Any) -> Any:
    """Rows over fsdp, what is inside of the layer over tensor too."""
    inside = lax.with_sharding_constraint(jnp.tanh(x @ w["in"]), P("fsdp", "tensor"))
    return lax.with_sharding_constraint(x + inside @ w["out"], P("fsdp", None))


def loss(weights: Any, x: Any, y: Any) -> Any:
    for w in weights:
        x = mark_stage_end(constrained(w, x))
    return squared_error(x, y)


def compare_on(mesh: Any, step: Callable, *args: Any, **options: Any) -> Any:
    """Like `compare`; the reference runs on one device that plays all axes."""
    result = mpmd_jit_with_loop(step, mesh, **options)(*args)
    one = jax.sharding.Mesh(
        np.array(jax.devices()[:1]).reshape([1] * len(mesh.jax_mesh.axis_names)),
        mesh.jax_mesh.axis_names,
    )
    with jax.set_mesh(one):
        assert_close(result, jax.jit(step)(*args))
    return result


@pytest.mark.parametrize("schedule", [Std1F1B(2), ZeroBubble(2)], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("axes", AXES)
def test_fsdp_and_tensor_inside_a_stage_with_automatic_axes(axes: str, schedule: Any):
    specs, data = [SPEC] * 2, P(None, "fsdp")
    _, grads = compare_on(
        groups(2, **AXES[axes]),
        gradients(schedule, loss),
        layers(2),
        *batch(4, ROWS),
        in_specs=(specs, data, data),
        out_specs=(None, specs),
    )
    assert [g.spec for g in grads[1].values()] == list(SPEC.values())
    (array,) = grads[0]["in"]._partially_addressable_arrays.values()
    whole, part = array.shape, array.addressable_shards[0].data.shape
    assert whole[0] // part[0] == AXES[axes]["fsdp"]
    assert whole[1] // part[1] == AXES[axes]["tensor"]


def test_dualpipev_with_fsdp_and_tensor():
    specs, data = [SPEC] * 4, P(None, "fsdp")
    compare_on(
        groups(2, fsdp=2, tensor=2),
        gradients(DualPipeV(4), loss),
        layers(4),
        *batch(4, ROWS),
        in_specs=(specs, data, data),
        out_specs=(None, specs),
    )


@pytest.mark.parametrize("given", [True, False], ids=["out_specs", "no_out_specs"])
def test_a_training_step_with_fsdp_and_tensor(given: bool):
    """Weights and moments come back as they are given, step after step, also where results are
    left open."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))

    step, weights = training(optimizer, Std1F1B(2), loss), layers(2)
    with jax.numpy_dtype_promotion("standard"):
        state = weights, optimizer.init(weights)
        specs = jax.tree_util.tree_map_with_path(
            lambda path, x: SPEC[path[-1].key] if x.ndim else P(), state
        )
        mesh, data = groups(2, fsdp=2, tensor=2), P(None, "fsdp")
        state, _ = compare_on(
            mesh,
            step,
            state,
            *batch(4, ROWS),
            in_specs=(specs, data, data),
            out_specs=(specs, P()) if given else None,
        )
    assert jax.tree.map(lambda x: x.spec, state) == specs


def test_rows_over_fsdp_alone_need_no_constraints():
    """ZeRO-3: the compiler gathers weights where rows are divided."""

    def plain_loss(weights: Any, x: Any, y: Any) -> Any:
        for w in weights:
            x = mark_stage_end(x + jnp.tanh(x @ w["in"]) @ w["out"])
        return squared_error(x, y)

    specs, data = [{"in": P("fsdp"), "out": P("fsdp")}] * 4, P(None, "fsdp")
    compare_on(
        groups(4, fsdp=2),
        gradients(Std1F1B(4), plain_loss),
        layers(4),
        *batch(4, ROWS),
        in_specs=(specs, data, data),
        out_specs=(P(), specs),
    )


def test_a_shard_map_inside_a_stage():
    """Its mesh is the one of the context, where the axis of groups has size 1."""

    def by_hand(w: Any, x: Any) -> Any:
        def of_shard(w: Any, x: Any) -> Any:
            return lax.psum(jnp.tanh(x @ w["in"]) @ w["out"], "tensor")

        specs = ({"in": P(None, "tensor"), "out": P("tensor", None)}, P("fsdp", None))
        return x + jax.shard_map(of_shard, in_specs=specs, out_specs=P("fsdp", None))(w, x)

    def loss(weights: Any, x: Any, y: Any) -> Any:
        for w in weights:
            x = mark_stage_end(by_hand(w, x))
        return squared_error(x, y)

    for schedule in (Std1F1B(2), ZeroBubble(2)):
        step = gradients(schedule, loss)
        compare_on(groups(2, fsdp=2, tensor=2), step, layers(2), *batch(4, ROWS))
