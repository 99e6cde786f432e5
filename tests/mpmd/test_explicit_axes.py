"""Steps that are written for explicit axes, as JaxPP's pages about gradients and tasks write them.

The reference is JAX's own: the same step, without marks, loops and groups, on a mesh of one group
whose axis is explicit, where JAX checks and follows the types.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpipe.mpmd.jaxpp as jaxpp
from mpmd.small import TOLERANCE, numbers, on_host, runs

FSDP, MICROBATCHES = 2, 3
REDUCED = P(reduced=frozenset({"fsdp"}))
WEIGHTS = [on_host({"in": numbers(i, 8, 16) / 4, "out": numbers(i + 9, 16, 8) / 4}) for i in (0, 1)]
XS = np.asarray(numbers(2, MICROBATCHES, 4, 8))

STAGES: dict[str, Callable] = {}


def in_stage(stage: Callable) -> Callable:
    STAGES[stage.__name__] = stage
    return stage


@in_stage
def einsum(w: Any, x: Any) -> Any:
    h = jnp.einsum("bd,dh->bh", x, w["in"], out_sharding=P("fsdp"))
    return x + jnp.einsum("bh,hd->bd", jnp.tanh(h), w["out"], out_sharding=P("fsdp", None))


@in_stage
def products(w: Any, x: Any) -> Any:
    h = jnp.dot(x, w["in"], out_sharding=P("fsdp", None))
    h = jax.lax.dot_general(jnp.tanh(h), w["out"], (((1,), (0,)), ((), ())), out_sharding=P("fsdp"))
    return jax.sharding.reshard(x + h, P("fsdp", None))


@in_stage
def movements(w: Any, x: Any) -> Any:
    """Functions whose `out_sharding` is not that of a product."""
    table = jax.sharding.reshard(w["out"], P(None, None))
    h = jnp.matmul(x, w["in"], out_sharding=P("fsdp", None))
    h = jnp.reshape(h, (4, 4, 4), out_sharding=P("fsdp"))
    scale = jnp.broadcast_to(table[:4, :1].sum(1), (4, 4, 4), out_sharding=P("fsdp", None, None))
    noise = jax.random.normal(jax.random.key(0), (4, 4, 4), out_sharding=P("fsdp"))
    h = jnp.tanh(h * scale + noise + jax.nn.one_hot(jnp.arange(4), 4))
    rows = table.at[jnp.array([1, 3, 0, 2])].get(out_sharding=P("fsdp"))
    scores = jnp.repeat(h.sum((1, 2))[:, None], 8, 1, total_repeat_length=8, out_sharding=P("fsdp"))
    return x + scores * rows


@in_stage
def named(w: Any, x: Any) -> Any:
    """Shardings of a mesh: the reference has a mesh of its own."""
    (mesh,) = MESH
    h = jnp.dot(x, w["in"], out_sharding=NamedSharding(mesh, P("fsdp")))
    h = jnp.dot(jnp.tanh(h), w["out"], out_sharding=NamedSharding(mesh, P("fsdp")))
    return jax.sharding.reshard(x + h, NamedSharding(mesh, P("fsdp")))


MESH: list[Mesh] = []


def plain(loss: Callable, weights: Any, x: Any) -> Any:
    return jax.value_and_grad(loss)(weights, x)


def unreduced(loss: Callable, weights: Any, x: Any) -> Any:
    """The pattern of JaxPP's page: weights that are gathered once, gradients that are partial."""
    gathered = jax.tree.map(lambda w: jax.sharding.reshard(w, REDUCED), weights)
    return jax.value_and_grad(loss)(gathered, x)


def losses(stage: Callable, mark: Callable) -> Callable[..., Any]:
    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = mark(stage(w, x))
        return jnp.sum(x**2)

    return loss


def updated(weights: Any, grads: Any) -> Any:
    """What follows the loop: the one reduction, and an update of weights that are divided."""
    grads = jax.tree.map(lambda g: jax.sharding.reshard(g, P("fsdp", None)), grads)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, grads)


def reference(stage: Callable, grad: Callable) -> Any:
    mesh = jax.make_mesh((FSDP,), ("fsdp",), devices=jax.devices()[:FSDP])
    MESH[:] = [mesh]

    def step(weights: Any, xs: Any) -> Any:
        total: Any = None
        for x in xs:
            new = grad(losses(stage, lambda x: x), weights, x)
            total = new if total is None else jax.tree.map(jnp.add, total, new)
        value, grads = total
        return value, updated(weights, grads)

    with jax.set_mesh(mesh):
        weights = jax.device_put(WEIGHTS, NamedSharding(mesh, P("fsdp", None)))
        xs = [jax.device_put(x, NamedSharding(mesh, P("fsdp", None))) for x in XS]
        return on_host(jax.jit(step)(weights, xs))


def check(stage: Callable, grad: Callable, place: Callable = lambda tree, mesh: tree) -> Any:
    true = reference(stage, grad)
    mesh = jax.make_mesh((2, FSDP), ("stage", "fsdp"), devices=jax.devices()[: 2 * FSDP])
    assert set(mesh.axis_types) == {AxisType.Explicit}
    MESH[:] = [mesh]

    def step(weights: Any, xs: Any) -> Any:
        loss = losses(stage, jaxpp.mark_stage_end)
        value, grads = jaxpp.treduce(
            lambda x: grad(loss, weights, x), xs, jaxpp.Std1F1B(2), operation=jaxpp.Add
        )
        return value, updated(weights, grads)

    compiled = jaxpp.mpmd_jit_with_loop(step, jaxpp.MpmdMesh(mesh, "stage"))
    value, weights = compiled(place(WEIGHTS, mesh), place(XS, mesh))
    again = compiled(weights, XS)[0]
    assert float(again) < float(value), "results are arguments of the next step"
    for x, y in zip(jax.tree.leaves((value, weights)), jax.tree.leaves(true), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=TOLERANCE * np.max(np.abs(y)))
    assert [w["in"].spec for w in weights] == [P("fsdp", None)] * 2
    return compiled


@pytest.mark.parametrize("name", STAGES)
def test_out_shardings_in_a_stage_run_and_change_no_number(name: str):
    check(STAGES[name], plain)


@pytest.mark.parametrize("grad", [plain, unreduced])
def test_under_plain_jit_the_loop_is_a_scan_with_types(grad: Callable):
    """Its sums are divided, or unreduced, as the results of a microbatch are."""
    true_value, true_weights = reference(einsum, grad)

    def step(weights: Any, xs: Any) -> Any:
        loss = losses(einsum, jaxpp.mark_stage_end)
        values, grads = jaxpp.treduce(lambda x: grad(loss, weights, x), xs, jaxpp.Std1F1B(2))
        return values, updated(weights, grads)

    mesh = MESH[0]
    with jax.set_mesh(mesh):
        weights = jax.device_put(WEIGHTS, NamedSharding(mesh, P("fsdp", None)))
        values, new = jax.jit(step)(
            weights, jax.device_put(XS, NamedSharding(mesh, P(None, "fsdp")))
        )
    np.testing.assert_allclose(values.sum(), true_value, rtol=TOLERANCE)
    for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(true_weights), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=TOLERANCE * np.max(np.abs(y)))


def test_products_and_reshards_are_constrained():
    mesh = jax.make_mesh((2, FSDP), ("stage", "fsdp"), devices=jax.devices()[: 2 * FSDP])
    groups = jaxpp.MpmdMesh(mesh, "stage")
    lowered = jaxpp.mpmd_jit_with_loop(partial(products, WEIGHTS[0]), groups).lower(XS[0])
    graphs = [run.graph for run in runs(lowered.program)]
    names = [getattr(eqn.operation, "name", "") for graph in graphs for eqn in graph.eqns]
    assert names.count("sharding_constraint") == 3


def test_reduced_weights_and_unreduced_gradients_are_summed_and_that_is_said(caplog: Any):
    with caplog.at_level(logging.WARNING, "jaxpipe.mpmd"):
        check(einsum, unreduced)
    said = [r.getMessage() for r in caplog.records if "summed over devices" in r.getMessage()]
    assert len(said) == 1
    assert "P(reduced={'fsdp'})" in said[0] and "spmd_axis_name='fsdp'" in said[0]


@pytest.mark.parametrize("spec", [P("fsdp"), P(("stage", "fsdp")), REDUCED], ids=str)
def test_arguments_with_types_of_explicit_axes_are_moved_to_their_groups(spec: P):
    def place(tree: Any, mesh: Any) -> Any:
        return jax.device_put(tree, NamedSharding(mesh, spec)) if isinstance(tree, list) else tree

    check(einsum, plain, place)


def test_an_argument_whose_sums_are_not_computed_is_refused_by_name():
    mesh = jax.make_mesh((2, 2), ("stage", "fsdp"), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        partial_sums = P(unreduced=frozenset({"fsdp"}))
        x = jax.jit(lambda: jax.sharding.reshard(jnp.ones((4, 4)), partial_sums))()
    step = jaxpp.mpmd_jit_with_loop(lambda x: x * 2, jaxpp.MpmdMesh(mesh, "stage"))
    with pytest.raises(ValueError, match=r"float32\[4, 4\], has the spec .*Reduce it before"):
        step(x)


def test_automatic_axes_have_no_out_sharding_as_in_jax():
    mesh = jaxpp.MpmdMesh(jax.make_mesh((2, 2), ("stage", "fsdp"), (AxisType.Auto,) * 2), "stage")
    with pytest.raises(ValueError, match="that are of type Auto"):
        jaxpp.mpmd_jit_with_loop(lambda x: einsum(WEIGHTS[0], x), mesh)(XS[0])
