"""When weights are gathered, read from the program: while nothing waits for them."""

import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P

from jaxpipe import sharding, spmd
from jaxpipe.sharding import gathered_rules
from jaxpipe.spmd.weight_gather import (
    gather_by_specs,
    gather_in_layers,
    layer_gather,
    specs_of,
    unsharded_specs,
)

RANKS, REPEATS, MICROBATCHES, DIM = 2, 5, 4, 8
WEIGHTS = jnp.ones((REPEATS, RANKS, DIM, DIM))
INPUTS = jnp.ones((MICROBATCHES, 2, 3, DIM))


def stage(w, x, batch_inputs, rng):
    return jnp.tanh(x @ w), {}


def gather_by_axes(batch_axes=("fsdp",)):
    axes = ("embed", "mlp")
    return spmd.gather_weights(axes, sharding.DEFAULT_RULES, when="repeat", batch_axes=batch_axes)


STORED, UNSHARDED = (
    specs_of(("embed", "mlp"), rules)
    for rules in (sharding.DEFAULT_RULES, gathered_rules(sharding.DEFAULT_RULES))
)


def stage_that_gathers(w, x, batch_inputs, rng):
    w = layer_gather(STORED, UNSHARDED, batch_axes=("fsdp",))(w, x)
    return stage(w, x, batch_inputs, rng)


def loss(weights, inputs, gather=None, stage=stage, **more_axes):
    sizes = {"stage": RANKS, "fsdp": 2, **more_axes}
    mesh = sharding.make_mesh(sizes, devices=jax.devices()[: math.prod(sizes.values())])
    gather = gather_by_axes() if gather is None else gather
    return jnp.sum(spmd.circular(stage, weights, inputs, mesh=mesh, gather=gather)[0])


def inner_jaxprs(eqn: Any) -> list[Any]:
    found = [x for x in jax.tree.leaves(list(eqn.params.values())) if hasattr(x, "eqns")]
    return [getattr(x, "jaxpr", x) for x in found]


def bodies(jaxpr: Any) -> list[Any]:
    """Of all loops, those around others first."""
    found = []
    for eqn in jaxpr.eqns:
        for inner in inner_jaxprs(eqn):
            found += [inner] * (eqn.primitive.name == "scan") + bodies(inner)
    return found


def reached(jaxpr: Any, sources: list[Any]) -> set[Any]:
    """All variables that are computed from what `sources`, equations of `jaxpr`, compute."""
    found = {var for eqn in sources for var in eqn.outvars}
    for eqn in jaxpr.eqns:
        if found.intersection(read(eqn)):
            found.update(eqn.outvars)
    return found


def read(*eqns: Any) -> list[Any]:
    return [v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal)]


def named(jaxpr: Any, *names: str) -> list[Any]:
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name in names]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_tick_neither_waits_for_the_parts_that_it_moves_nor_lets_them_wait(direction):
    jaxpr = jax.make_jaxpr(jax.grad(loss))(WEIGHTS, INPUTS).jaxpr
    ticks = bodies(jaxpr)
    body = ticks[0 if direction == "forward" else 1]
    work = named(body, "dot_general")  # of the backward: computed again, and for both gradients
    gathers = named(body, "all_gather")
    scatters = named(body, "reduce_scatter", "psum_scatter")
    assert len(ticks) == 2 and len(gathers) == 1
    assert len(work) == (3 if direction == "backward" else 1)
    assert len(scatters) == (direction == "backward")
    assert not reached(body, work).intersection(read(*gathers, *scatters))
    assert not reached(body, gathers + scatters).intersection(read(*work))
    assert reached(body, gathers).intersection(body.outvars)
    assert all(aval.size < DIM * DIM for eqn in gathers for aval in [eqn.outvars[0].aval])


@pytest.mark.parametrize("when", ["repeat", "once", "tick"])
@pytest.mark.parametrize(
    ("specs", "batch_axes"),
    [
        ({"w": P("fsdp"), "v": P(None, "fsdp"), "s": P()}, ("fsdp",)),
        ({"w": P("fsdp"), "v": P("tensor", "fsdp"), "s": P()}, ("fsdp",)),
        ({"w": P("fsdp", "tensor"), "v": P("tensor", "fsdp"), "s": P()}, ()),
        ({"w": P(), "v": P("tensor"), "s": P()}, ("fsdp",)),
    ],
)
def test_parts_that_do_not_divide_are_exact(when, specs, batch_axes):
    rows, sizes = 6, {"stage": 2, "fsdp": 2, "tensor": 2}
    keys = jax.random.split(jax.random.key(0), 4)
    weights = {
        "w": jax.random.normal(keys[0], (REPEATS, RANKS, rows, 10)) / 3,
        "v": jax.random.normal(keys[1], (REPEATS, RANKS, 10, rows)) / 3,
        "s": 1 + jax.random.normal(keys[2], (REPEATS, RANKS)) / 9,
    }
    inputs = jax.random.normal(keys[3], (MICROBATCHES, 2, rows))

    def stage(w, x, batch_inputs, rng):
        return jnp.tanh(x @ w["w"]) @ w["v"] * w["s"]

    def plain(weights, inputs):
        for repeat in range(REPEATS):
            for rank in range(RANKS):
                own = jax.tree.map(lambda w, at=(repeat, rank): w[at], weights)
                inputs = stage(own, inputs, (), ())
        return jnp.sum(jnp.sin(inputs))

    gather = gather_by_specs(specs, unsharded_specs(specs), when=when, batch_axes=batch_axes)
    mesh = sharding.make_mesh(sizes, devices=jax.devices()[:8])

    def piped(weights, inputs):
        y, _ = spmd.circular(stage, weights, inputs, mesh=mesh, gather=gather)
        return jnp.sum(jnp.sin(y))

    got = jax.jit(jax.value_and_grad(piped, argnums=(0, 1)))(weights, inputs)
    wanted = jax.value_and_grad(plain, argnums=(0, 1))(weights, inputs)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert jnp.max(jnp.abs(a - b)) <= 1e-5 * jnp.max(jnp.abs(b))


def test_parts_of_weights_that_a_function_gathers_are_refused():
    gather = spmd.Gather("repeat", unshard=lambda w: w + 0)
    with pytest.raises(ValueError, match="Make it by `gather_weights`"):
        loss(WEIGHTS, INPUTS, gather=gather)


@pytest.mark.parametrize("per_layer", [False, True])
def test_what_tensor_shards_split_stays_split_where_fsdp_is_gathered(per_layer):
    in_layers = gather_in_layers(STORED, UNSHARDED, batch_axes=("fsdp",))
    gather = in_layers if per_layer else None
    run = stage_that_gathers if per_layer else stage
    gradient = jax.jit(jax.grad(partial(loss, gather=gather, stage=run, tensor=2)))
    mesh = sharding.make_mesh({"stage": RANKS, "fsdp": 2, "tensor": 2}, devices=jax.devices()[:8])
    stored = jax.NamedSharding(mesh, jax.P(None, "stage", "fsdp", "tensor"))
    weights = jax.ShapeDtypeStruct(WEIGHTS.shape, WEIGHTS.dtype, sharding=stored)
    text = gradient.lower(weights, INPUTS).compile().as_text() or ""
    results = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    sizes = {math.prod(map(int, dims.split(","))) for dims in results}
    assert DIM * DIM // 2 in sizes  # of a weight; activations are smaller
    assert max(sizes) == DIM * DIM // 2
    assert f"{DIM // 2},{DIM}" not in results  # gathered over tensor instead


@pytest.mark.parametrize("batch_axes", [(), ("fsdp",)])
def test_specs_gather_in_the_same_program_as_the_logical_axes_they_come_from(batch_axes):
    stored = sharding.partition_spec(("embed", "mlp"), sharding.DEFAULT_RULES)
    by_specs = gather_by_specs(
        stored, unsharded_specs(stored), when="repeat", batch_axes=batch_axes
    )
    texts = [
        jax.jit(jax.grad(partial(loss, gather=gather, tensor=2))).lower(WEIGHTS, INPUTS).as_text()
        for gather in (by_specs, gather_by_axes(batch_axes))
    ]
    assert texts[0] == texts[1]
