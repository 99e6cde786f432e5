"""How sums of gradients are divided within a group: as the user says, without a gather."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpipe.mpmd import Add, MpmdMesh, MpmdSharding, mark_stage_end, mpmd_jit_with_loop, treduce
from jaxpipe.mpmd.api import sharding_in_group
from jaxpipe.mpmd.jaxpp import Std1F1B, ZeroBubble
from mpmd.small import (
    WIDTH,
    assert_close,
    batch,
    gradients,
    groups,
    layer,
    layers,
    marked_loss,
    numbers,
    runs,
    squared_error,
)

FSDP, MICROBATCHES, ROWS = 2, 3, 2
KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
COLLECTIVE = re.compile(rf"= (\S+|\(.+?\)) ({KINDS})(?:-start)?\(")


def loss(weights: Any, x: Any, y: Any) -> Any:
    """Weights are gathered where they are used; rows stay where they are."""
    for w in weights:
        w, x = lax.with_sharding_constraint((w, x), P())
        x = mark_stage_end(layer(w, x))
    return squared_error(x, y)


def delayed(schedule: Any, *, inside: bool) -> Callable:
    """A step as JaxPP documents it for automatic axes: a gradient for each replica, which are added
    up once. The constraint stands in the loop, or behind it."""
    constrain = lambda tree: lax.with_sharding_constraint(tree, P("fsdp"))  # noqa: E731

    def step(weights: Any, xs: Any, ys: Any) -> Any:
        grad = jax.vmap(jax.value_and_grad(loss), (None, 0, 0), spmd_axis_name="fsdp")

        def of_microbatch(of_m: Any) -> Any:
            return constrain(grad(weights, *of_m)) if inside else grad(weights, *of_m)

        parts = treduce(of_microbatch, (xs, ys), schedule, operation=Add)
        values, grads = parts if inside else constrain(parts)
        return values.sum(), jax.tree.map(lambda g: g.sum(0), grads)

    return step


def by_hand(weights: Any, xs: Any, ys: Any) -> Any:
    flat = (FSDP * MICROBATCHES, ROWS, WIDTH)
    each = [
        jax.value_and_grad(loss)(weights, x, y)
        for x, y in zip(xs.reshape(flat), ys.reshape(flat), strict=True)
    ]
    return jax.tree.map(lambda *parts: sum(parts), *each)


def collectives(text: str | None) -> Counter:
    """How many of each there are, with the shapes of their results."""
    found = Counter()
    for shapes, kind in COLLECTIVE.findall(text or ""):
        found.update((kind, shape) for shape in re.findall(r"\w+\[[\d,]*\]", shapes))
    return found


@pytest.mark.parametrize("inside", [True, False], ids=["in_the_loop", "behind_the_loop"])
@pytest.mark.parametrize("spec", [P(), P("fsdp")], ids=["replicated", "fsdp"])
@pytest.mark.parametrize("schedule", [Std1F1B(2), ZeroBubble(2)], ids=lambda s: type(s).__name__)
def test_a_delayed_reduction_is_one_per_step_and_no_accumulator_is_gathered(
    schedule: Any, spec: Any, inside: bool
):
    """Read in the compiled programs of every task of every rank: behind the loop, in a program that
    runs once, each weight of the rank is reduced once, and so is the loss on the last rank."""
    shape = MICROBATCHES, FSDP, ROWS, WIDTH
    args = layers(2), numbers(7, *shape), numbers(8, *shape)
    step = mpmd_jit_with_loop(
        delayed(schedule, inside=inside),
        groups(2, fsdp=FSDP),
        in_specs=(spec, P(None, "fsdp"), P(None, "fsdp")),
        out_specs=(P(), spec),
    )
    compiled = step.compile(*args)
    with jax.set_mesh(jax.sharding.Mesh(jax.devices()[:1], "fsdp")):
        true = jax.jit(by_hand)(*args)
    assert_close(compiled(*args), true)

    found = {name: collectives(program.as_text()) for name, program in compiled.programs.items()}
    names = Counter(f"{run.name}@{run.rank}" for run in runs(compiled.lowered.program))
    assert set(names) == set(found)
    once = Counter({("all-reduce", "f32[8,16]"): 1, ("all-reduce", "f32[16,8]"): 1})
    of_loss = Counter({("all-reduce", "f32[]"): 1})
    accumulators = {"f32[2,8,16]", "f32[2,16,8]"}
    for name, of_program in found.items():
        gathered = {shape for kind, shape in of_program if kind == "all-gather"}
        assert gathered.isdisjoint(accumulators), f"{name}: {of_program}"
        if name.startswith("after_loop"):
            expected = once + of_loss if name == "after_loop@1" else once
            assert names[name] == 1 and of_program == expected, f"{name}: {of_program}"
        else:
            assert {kind for kind, _ in of_program} <= {"all-gather"}, f"{name}: {of_program}"
            assert spec == P("fsdp") or not gathered, f"{name}: {of_program}"
    assert {name for name in names if name.startswith("after_loop")} == {
        "after_loop@0",
        "after_loop@1",
    }


def test_the_gradient_of_a_shared_weight_stays_a_sum_of_shares_when_it_is_constrained():
    """Each stage adds up its share in the layout that is asked for, and sends it once."""

    def shared(weights: Any, x: Any, y: Any) -> Any:
        for w in weights[:2]:
            x = mark_stage_end(layer(weights[0], layer(w, x)))
        return squared_error(x, y)

    def step(weights: Any, xs: Any, ys: Any) -> Any:
        def of_microbatch(of_m: Any) -> Any:
            value, grads = jax.value_and_grad(shared)(weights, *of_m)
            return value, lax.with_sharding_constraint(grads, P("fsdp"))

        return treduce(of_microbatch, (xs, ys), Std1F1B(2), operation=Add)

    shape = MICROBATCHES, ROWS, WIDTH
    args = layers(2), numbers(7, *shape), numbers(8, *shape)
    pipelined = mpmd_jit_with_loop(step, groups(2, fsdp=FSDP))
    value, grads = pipelined(*args)
    one = jax.sharding.Mesh(jax.devices()[:1], ("fsdp",))
    with jax.set_mesh(one):
        assert_close((value, grads), jax.jit(step)(*args))
    assert {g.spec for g in jax.tree.leaves(grads)} == {P("fsdp")}
    program = pipelined.lower(*args).program
    loops = [i for i in runs(program) if i.name != "after_loop"]
    written = [b for i in loops if i.rank == 1 for b in i.writes if b.value.aval.shape == (8, 16)]
    assert {b.version for b in written} == {0, 1, 2, None}, "only versions of sums"


def test_a_constraint_on_a_result_over_the_axis_of_groups_is_refused():
    def step(weights: Any, xs: Any) -> Any:
        def of_microbatch(x: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(weights, x, x)
            return value, lax.with_sharding_constraint(grads, P("stage"))

        return treduce(of_microbatch, xs, Std1F1B(2), operation=Add)

    jitted = mpmd_jit_with_loop(step, groups(2))
    with pytest.raises(ValueError, match=r"`with_sharding_constraint` has the spec P\(.stage"):
        jitted.lower(layers(2), jnp.ones((2, ROWS, WIDTH)))


@pytest.mark.parametrize("kind", ["unreduced", "reduced"])
def test_reduced_and_unreduced_axes_are_refused_with_what_to_write_instead(kind: str):
    """JAX has them for explicit axes, and those of a group are automatic.

    A reshard to them in a step for explicit axes runs: test_explicit_axes.py.
    """
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    explicit = jax.sharding.Mesh(
        devices, ("stage", "fsdp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )
    mesh, x, axes = MpmdMesh(explicit, "stage"), jnp.ones(4), {kind: frozenset({"fsdp"})}
    spec = P(**axes)
    where = jax.sharding.NamedSharding(explicit, spec)
    instead = r".*spmd_axis_name='fsdp'"

    def constrained(x: Any) -> Any:
        return jax.jit(jnp.sin, out_shardings=where)(x)

    def resharded(x: Any) -> Any:
        return jax.sharding.reshard(x, spec)

    automatic = groups(2, fsdp=2)

    cases: list[tuple[str, Any]] = [
        (r"`in_specs\[0\]` has the spec", lambda: mpmd_jit_with_loop(f, mesh, in_specs=(spec,))),
        (r"`out_specs` has the spec", lambda: mpmd_jit_with_loop(f, mesh, out_specs=spec)),
        (r"`in_shardings", lambda: mpmd_jit_with_loop(f, mesh, in_shardings=where)),
        (r"`MpmdSharding` has the spec", lambda: MpmdSharding(mesh, {0}, spec)),
        (r"A sharding inside `fun` has", lambda: mpmd_jit_with_loop(constrained, mesh)),
        (r"educed axes can only refer to", lambda: mpmd_jit_with_loop(resharded, automatic)),
    ]
    f: Any = lambda x: 2 * x  # noqa: E731
    for message, make in cases:
        with pytest.raises(ValueError, match=message + instead):
            make()(x)


def test_a_constraint_to_the_mesh_of_all_groups_means_the_mesh_of_a_group():
    """Also where its axes are explicit, in a `jax.jit` that names its shardings, and in the
    backward. The constraint is in the program of the stage, and is not dropped."""
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    kinds = jax.sharding.AxisType
    args = layers(2), *(x[:, :2] for x in batch(2, 2))
    true = jax.jit(gradients(Std1F1B(2)))(*args)
    for types in ((kinds.Auto, kinds.Auto), (kinds.Explicit, kinds.Explicit)):
        whole = jax.sharding.Mesh(devices, ("stage", "fsdp"), axis_types=types)
        rows = jax.sharding.NamedSharding(whole, P("fsdp"))

        def constrained(w: Any, x: Any, rows: Any = rows) -> Any:
            f = jax.jit(jnp.tanh, in_shardings=rows, out_shardings=rows)
            h = lax.with_sharding_constraint(x @ w["in"], rows)
            return x + f(h) @ w["out"]

        def loss(weights: Any, x: Any, y: Any, stage: Any = constrained) -> Any:
            return marked_loss(weights, x, y, stage=stage)

        step = mpmd_jit_with_loop(gradients(Std1F1B(2), loss), MpmdMesh(whole, "stage"))
        compiled = step.compile(*args)
        assert_close(compiled(*args), true)
        (forward,) = [run.graph for run in runs(compiled.lowered.program) if run.name == "fwd_0__0"]
        names = [getattr(s.operation, "name", "") for s in forward.eqns]
        assert names.count("sharding_constraint") == 3 and "jit" not in names

        def wrong(x: Any, whole: Any = whole) -> Any:
            return jax.jit(jnp.sin, out_shardings=jax.sharding.NamedSharding(whole, P("stage")))(x)

        with pytest.raises(ValueError, match=r"`with_sharding_constraint` .*P\('stage'"):
            mpmd_jit_with_loop(wrong, MpmdMesh(whole, "stage"))(jnp.ones(4))


def test_a_sharding_of_a_group_is_not_translated_and_others_get_its_abstract_mesh():
    """Types of arrays have abstract meshes: a layer with experts that reshards to its own type
    failed over a concrete one."""
    mesh = groups(2, fsdp=2)
    group, spec = mesh.unstack[0], P("fsdp")
    for own in (group, group.abstract_mesh):
        sharding = jax.sharding.NamedSharding(own, spec)
        assert sharding_in_group(mesh, sharding) is sharding
    found = sharding_in_group(mesh, jax.sharding.NamedSharding(mesh.jax_mesh, spec))
    assert (found.mesh, found.spec) == (group.abstract_mesh, spec)
