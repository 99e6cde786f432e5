"""Sums of gradients that the last backward of a stage scatters are those of the plain program."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxpipe as jp
from jaxpipe._compat import jaxprs_in_params

DIM, ROWS, LAYERS = 8, 64, 24


def layer(w: Any, x: Any, batch: Any) -> Any:
    gate = jax.nn.silu(x @ w["gate"]) * batch["scale"][:, None]
    return x * w["norm"] + gate @ w["down"] + w["embedded"][w["index"]]


MODEL = jp.Model(
    embed=lambda w, batch: batch["x"] @ w,
    layer=layer,
    loss=lambda w, x, batch: jnp.mean(jnp.square(x @ w - batch["y"])),
)
SPECS = {"gate": P("fsdp", None), "down": P(None, "fsdp"), "embedded": P(None, "fsdp")}


def params(num_layers: int) -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 3 + 3 * num_layers))

    def matrix(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / DIM

    layers = [
        {
            "gate": matrix(DIM, 2 * DIM),
            "down": matrix(2 * DIM, DIM),
            "norm": jnp.ones(DIM),
            "embedded": matrix(3, DIM),
            "index": jnp.int32(i % 3),
        }
        for i in range(num_layers)
    ]
    return {"embed": matrix(DIM, DIM), "layers": layers, "head": matrix(DIM)}


def spec(path: str, leaf: Any) -> P | None:
    return next((spec for name, spec in SPECS.items() if name in path), None)


def batch() -> Any:
    keys = jax.random.split(jax.random.key(1), 3)
    return {
        "x": jax.random.normal(keys[0], (ROWS, DIM)),
        "y": jax.random.normal(keys[1], (ROWS,)),
        "scale": jax.random.uniform(keys[2], (ROWS,)),
    }


def scatters(jaxpr: Any, *, in_branch: bool = False) -> list[bool]:
    """Returns of every reduce-scatter whether it is in a branch."""
    are_in_branches = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "reduce_scatter":
            are_in_branches.append(in_branch)
        for inner in jaxprs_in_params(eqn.params):
            in_this = in_branch or eqn.primitive.name == "cond"
            are_in_branches += scatters(inner, in_branch=in_this)
    return are_in_branches


@pytest.mark.parametrize(
    ("sizes", "schedule", "microbatches", "options"),
    [
        ({"stage": 2, "fsdp": 2}, "1f1b", 4, {}),
        ({"stage": 2, "fsdp": 2}, "1f1b", 1, {}),
        ({"stage": 3, "fsdp": 2}, "zero_bubble_h1", 4, {}),
        ({"stage": 2, "fsdp": 2, "data": 2}, "zbv", 4, {}),
        ({"stage": 2, "fsdp": 2, "data": 2}, "interleaved_1f1b", 4, {"zero1": True}),
        ({"stage": 4, "fsdp": 2}, "looped_bfs", 4, {"chunks": 2}),
        ({"stage": 2, "fsdp": 4}, "gpipe", 4, {"reduce_dtype": jnp.float32}),
        ({"stage": 2, "fsdp": 2}, "dualpipev", 4, {}),
        ({"stage": 2, "fsdp": 2, "tensor": 2}, "1f1b", 4, {}),
        ({"stage": 8}, "1f1b", 8, {}),
    ],
    ids=str,
)
def test_numbers_are_those_of_the_plain_program(
    sizes: dict[str, int], schedule: str, microbatches: int, options: dict[str, Any]
):
    devices = jax.devices()[: math.prod(sizes.values())]
    pipe = jp.pipeline(
        MODEL,
        schedule=schedule,
        mesh=jp.make_mesh(sizes, devices=devices),
        microbatches=microbatches,
        gather="once",
        param_specs=spec,
        frozen=lambda path, leaf: not jnp.issubdtype(leaf.dtype, jnp.inexact),
        **options,
    )
    weights = params(LAYERS)
    stored = pipe.shard(weights)
    with jax.set_mesh(pipe.mesh):
        jaxpr = jax.make_jaxpr(pipe.value_and_grad)(stored, batch()).jaxpr
    # Three weights of a layer, with ZeRO-1 its norm too, in the branches that add last gradients.
    assert scatters(jaxpr).count(True) % (4 if "zero1" in options else 3) == 0
    assert any(scatters(jaxpr)) == ("fsdp" in sizes)
    pipe.check(weights, batch())


def scanned(w: Any, x: Any, batch: Any) -> Any:
    """Loops over the dim of weights that is the longest one, which is divided."""

    def add(total: Any, block: Any) -> tuple[Any, None]:
        return total + jnp.tanh(x @ block["up"]) @ block["up"].T, None

    return layer(w, x, batch) + jax.lax.scan(add, jnp.zeros_like(x), w["blocks"])[0]


def skipping(w: Any, x: Any, batch: Any) -> Any:
    """Computes some rows, and nothing on a device that has none of them."""
    chosen = batch["scale"] > 0.7

    def computed() -> Any:
        return jnp.where(chosen[:, None], layer(w, x, batch), x)

    return jax.lax.cond(jnp.any(chosen), computed, lambda: x)


LAYER_FUNCTIONS = {"loop": scanned, "condition": skipping}
BLOCKS = {"up": jnp.linspace(-0.1, 0.1, 2 * LAYERS * DIM * 3).reshape(2 * LAYERS, DIM, 3)}


@pytest.mark.parametrize(
    ("name", "axis", "options"),
    [
        ("loop", "fsdp", {"gather": "once"}),
        ("loop", "data", {"gather": "once", "zero1": True}),
        ("loop", "data", {"zero1": True}),
        ("condition", "fsdp", {"gather": "once", "row_wise": True}),
        ("condition", "fsdp", {"gather": "once"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1"])
def test_loops_and_conditions_of_a_layer_scatter_nothing(
    name: str, axis: str, options: dict[str, Any], schedule: str
):
    # Of a microbatch of 16 rows the first device has those that are computed, the second one none.
    rows = batch() | {"scale": jnp.where(jnp.arange(ROWS) // 8 % 2 == 0, 0.9, 0.3)}
    weights = params(8)
    if name == "loop":
        weights["layers"] = [w | {"blocks": BLOCKS} for w in weights["layers"]]
    pipe = jp.pipeline(
        dataclasses.replace(MODEL, layer=LAYER_FUNCTIONS[name]),
        schedule=schedule,
        mesh=jp.make_mesh({"stage": 2, axis: 2}, devices=jax.devices()[:4]),
        microbatches=4,
        frozen=lambda path, leaf: not jnp.issubdtype(leaf.dtype, jnp.inexact),
        **options,
    )
    pipe.check(weights, rows)


@pytest.mark.parametrize("reduce_dtype", [None, jnp.float32])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1", "zbv", "interleaved_1f1b"])
def test_layers_that_gather_scatter_over_data_alone(schedule: str, reduce_dtype: Any):
    """Sums of such layers are divided over `fsdp` before ZeRO-1 divides them over `data`."""
    pipe = jp.pipeline(
        MODEL,
        schedule=schedule,
        mesh=jp.make_mesh({"stage": 2, "fsdp": 2, "data": 2}),
        microbatches=4,
        gather="layer",
        zero1=True,
        reduce_dtype=reduce_dtype,
        param_specs=spec,
        frozen=lambda path, leaf: not jnp.issubdtype(leaf.dtype, jnp.inexact),
    )
    pipe.check(params(LAYERS), batch())
