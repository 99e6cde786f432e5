"""A stage that names shardings over the whole mesh, as layers do that are written for it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import pjit
from jax._src.lax import lax
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from harness.contract import assert_close
from jaxpipe import spmd
from jaxpipe.spmd.ranks import empty

AXES = ("stage", "fsdp", "tensor")
D, ROWS = 4, 4
EACH_TICK = spmd.Gather()
SHAPES = (1, 2), (2, ROWS, D)
"""Of weights that scale, and of inputs."""


def mesh_of(*explicit: str) -> Mesh:
    types = tuple(AxisType.Explicit if axis in explicit else AxisType.Auto for axis in AXES)
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), AXES, axis_types=types)


def plain(w, x, batch_inputs, rng):
    return jnp.tanh(x @ w["w"]) * 2.0 + x, {}


def constrained(mesh: Mesh) -> Any:
    """`plain`, with constraints."""

    def stage(w, x, batch_inputs, rng):
        h = with_sharding_constraint(x @ w["w"], NamedSharding(mesh, P("fsdp")))
        h = with_sharding_constraint(h, NamedSharding(mesh, P(("stage", "fsdp"), "tensor")))
        return jnp.tanh(h) * 2.0 + x, {}

    return stage


def in_jit(mesh: Mesh) -> Any:
    """`plain`, in a `jax.jit` that names shardings over `stage`."""

    def stage(w, x, batch_inputs, rng):
        rows = NamedSharding(mesh, P(("stage", "fsdp")))
        run = jax.jit(lambda h: jnp.tanh(h) * 2.0, in_shardings=rows, out_shardings=rows)
        return run(x @ w["w"]) + x, {}

    return stage


def resharded(mesh: Mesh) -> Any:
    """`plain`, with the explicit axes in the types of its arrays."""

    def stage(w, x, batch_inputs, rng):
        rows = NamedSharding(mesh, P(("stage", "fsdp")))
        h = jnp.einsum("rd,de->re", x, w["w"], out_sharding=rows)
        h = with_sharding_constraint(h, rows)
        assert jax.typeof(h).sharding.spec == P("fsdp", None)
        whole = reshard(h, NamedSharding(mesh, P("stage")))
        assert jax.typeof(whole).sharding.spec == P(None, None)
        return reshard(jnp.tanh(whole) * 2.0, rows) + x, {}

    return stage


def gradients(stage: Any, mesh: Mesh | None, gather: spmd.Gather = EACH_TICK) -> Any:
    key = jax.random.key(0)
    weights = {"w": jax.random.normal(key, (2, 2, D, D))}
    inputs = jax.random.normal(jax.random.fold_in(key, 1), (4, ROWS, D))
    if mesh is not None:
        put = P(None, "stage", "fsdp" if gather.when != "tick" else None)
        weights = jax.device_put(weights, NamedSharding(mesh, put))
        inputs = jax.device_put(inputs, NamedSharding(mesh, P("stage", "fsdp")))

    def loss(weights, inputs):
        y = spmd.circular(stage, weights, inputs, mesh=mesh, gather=gather)[0]
        return jnp.sum(jnp.sin(y))

    return jax.device_get(jax.jit(jax.value_and_grad(loss, (0, 1)))(weights, inputs))


def assert_same(got: Any, true: Any) -> None:
    jax.tree.map(lambda a, b: assert_close(a, b, "gradient"), got, true)


@pytest.fixture(scope="module")
def true() -> Any:
    return gradients(plain, None)


LOGICAL, RULES = {"w": ("embed", "mlp")}, [("embed", ("fsdp",)), ("mlp", ())]


@pytest.mark.parametrize(
    ("when", "batch_axes"), [("tick", ()), ("once", ()), ("repeat", ()), ("repeat", ("fsdp",))]
)
def test_constraints_of_a_stage_over_the_whole_mesh_keep_the_numbers(when, batch_axes, true):
    mesh = mesh_of()
    gather = spmd.gather_weights(LOGICAL, RULES, when=when, batch_axes=batch_axes)
    assert_same(gradients(constrained(mesh), mesh, gather), true)


def test_reshards_of_a_stage_over_the_whole_mesh_keep_the_numbers(true):
    mesh = mesh_of("stage", "fsdp")
    assert_same(gradients(resharded(mesh), mesh), true)
    mesh = mesh_of(*AXES)
    assert_same(gradients(resharded(mesh), mesh), true)


@pytest.mark.parametrize("explicit", [(), ("stage", "fsdp")], ids=["automatic", "explicit"])
def test_shardings_of_a_jit_inside_a_stage_are_constraints_there(explicit, true):
    mesh = mesh_of(*explicit)
    assert_same(gradients(in_jit(mesh), mesh), true)


def test_the_axes_of_sums_that_are_not_reduced_yet_are_translated_too():
    """`stage` leaves the sets of the spec. Nothing is compiled: XLA:CPU aborts on this stage in jax
    0.10.2."""
    mesh, seen = mesh_of(*AXES), []

    def stage(w, x, batch_inputs, rng):
        split = reshard(x, NamedSharding(mesh, P(None, "tensor")))
        rows = reshard(w["w"], NamedSharding(mesh, P("tensor", reduced=frozenset({"stage"}))))
        parts = NamedSharding(mesh, P(None, unreduced=frozenset({"stage", "tensor"})))
        h = jnp.einsum("rd,de->re", split, rows, out_sharding=parts)
        seen.append(jax.typeof(h).sharding.spec.unreduced)
        h = reshard(h, NamedSharding(mesh, P("fsdp")))
        return jnp.tanh(h) * 2.0 + x, {}

    shapes = {"w": jnp.ones((2, 2, D, D))}, jnp.ones((4, ROWS, D))
    jax.eval_shape(lambda w, x: spmd.circular(stage, w, x, mesh=mesh), *shapes)
    assert set(seen) == {frozenset({"tensor"})}


def test_a_stage_that_splits_what_it_was_given_whole_returns_it_as_given(true):
    mesh = mesh_of(*AXES)

    def stage(w, x, batch_inputs, rng):
        y, aux = plain(w, x, batch_inputs, rng)
        return reshard(y, NamedSharding(mesh, P(None, "tensor"))), aux

    assert_same(gradients(stage, mesh), true)


def test_axes_that_are_automatic_in_a_stage_are_constrained_and_manual_ones_left_out():
    mesh = mesh_of()

    def stage(w, x, batch_inputs, rng):
        where = NamedSharding(mesh, P(("stage", "fsdp"), "tensor"))
        return with_sharding_constraint(x * w, where)

    run = jax.jit(lambda w, x: spmd.circular(stage, w, x, mesh=mesh))
    assert '[{"fsdp"}, {"tensor"}]' in run.lower(*map(jnp.ones, SHAPES)).as_text()


def test_a_sharding_of_another_mesh_is_refused_by_jax_as_ever():
    mesh = mesh_of()
    other = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "fsdp"))

    def stage(w, x, batch_inputs, rng):
        return with_sharding_constraint(x * w, NamedSharding(other, P("fsdp"))), {}

    with pytest.raises(ValueError, match="manual_axis_type"):
        jax.eval_shape(lambda w, x: spmd.circular(stage, w, x, mesh=mesh), *map(jnp.ones, SHAPES))


def test_outside_of_a_stage_jax_is_as_it_was():
    def seen():
        primitives = pjit.sharding_constraint_p, pjit.reshard_p, pjit.jit_p
        return [*("bind" in vars(p) for p in primitives), vars(lax)["canonicalize_sharding"]]

    before, during = seen(), []

    def stage(w, x, batch_inputs, rng):
        during.append(seen())
        return x * w, {}

    mesh = mesh_of()
    jax.eval_shape(lambda w, x: spmd.circular(stage, w, x, mesh=mesh), *map(jnp.ones, SHAPES))
    assert before[:3] == [False] * 3 and during[0][:3] == [True] * 3
    assert seen() == before


@pytest.mark.parametrize(
    ("platform", "axes", "primitive"),
    [
        ("tpu", {"tensor": 2}, "empty"),
        ("gpu", {"tensor": 2}, "broadcast_in_dim"),
        ("gpu", {"stage": 2, "tensor": 1}, "empty"),
    ],
)
def test_buffers_are_filled_only_where_xla_cannot_split_unfilled_ones(platform, axes, primitive):
    """XLA:GPU would allocate all of an unfilled array on every device of automatic axes."""
    device = jax.sharding.AbstractDevice(device_kind="any", num_cores=None, platform=platform)
    types = tuple(AxisType.Manual if name == "stage" else AxisType.Auto for name in axes)
    mesh = jax.sharding.AbstractMesh(
        tuple(axes.values()), tuple(axes), axis_types=types, abstract_device=device
    )
    entry = jax.typeof(jnp.ones((2, 4)))
    with jax.sharding.use_abstract_mesh(mesh):
        made: Any = jax.make_jaxpr(lambda: empty(entry, 3))()
    assert made.eqns[0].primitive.name == primitive
    assert made.out_avals[0].shape == (3, 2, 4)
