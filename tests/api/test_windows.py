"""Convolutions and pools whose rows or tokens are divided have the plain program's gradients.

Where XLA's partitioner computes them wrong, they are refused.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpipe as jp

D, T, B = 8, 4, 32


def convolved(kernel: Any, x: Any, groups: int) -> Any:
    """A causal convolution over tokens."""
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(1,),
        padding=[(1, 0)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=groups,
    )


def layer(groups: int, w: Any, x: Any, batch: Any) -> Any:
    places = jnp.arange(float(T))[:, None] / T
    return x + jnp.tanh(convolved(w["kernel"], x, groups) + places)


def pooled(x: Any, width: int, stride: int) -> Any:
    """The largest of `width` tokens."""
    widths, strides = (1, width, 1), (1, stride, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, widths, strides, "SAME")


def pooling(width: int, stride: int, w: Any, x: Any, batch: Any) -> Any:
    return x + jnp.repeat(pooled(x @ w["kernel"][0], width, stride), stride, axis=1)


def params(groups: int) -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    kernel = jax.random.normal(keys[0], (2, 2, D // groups, D)) * groups**0.5 / 4
    return {
        "embed": jax.random.normal(keys[1], (D, D)) / 3,
        "layers": {"kernel": kernel},
        "head": jax.random.normal(keys[2], (D,)) / 3,
    }


def pipeline(engine: str, function: Any, mesh: dict[str, int], **model: Any) -> Any:
    own = jp.Model(
        embed=lambda w, batch: batch["x"] @ w,
        layer=function,
        loss=lambda w, x, batch: jnp.mean((x @ w - batch["y"]) ** 2),
        **model,
    )
    schedule = {"unpipelined": None, "circular": "circular"}.get(engine, "1f1b")
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    return jp.pipeline(
        own,
        schedule=schedule,
        engine=engine,
        mesh=jp.make_mesh(mesh, devices=devices),
        microbatches=2,
    )


def batch() -> Any:
    keys = jax.random.split(jax.random.key(1), 2)
    return {"x": jax.random.normal(keys[0], (B, T, D)), "y": jax.random.normal(keys[1], (B, T))}


STAGES = {"stage": 2}


@pytest.mark.parametrize(
    ("engine", "mesh", "groups"),
    [
        ("unpipelined", {"data": 2, "fsdp": 2}, D),
        ("unpipelined", {"data": 2, "tensor": 2}, 1),
        ("circular", STAGES | {"data": 2, "tensor": 2}, D),
        ("scheduled", STAGES | {"data": 2, "expert": 2}, D),
        ("mpmd", STAGES | {"data": 2, "fsdp": 2}, 2),
    ],
)
def test_gradients_of_kernels_are_those_of_the_plain_program(engine: str, mesh: Any, groups: int):
    pipe = pipeline(engine, partial(layer, groups), mesh)
    assert pipe.check(params(groups), batch()).largest <= 1e-5


@pytest.mark.parametrize("engine", ["unpipelined", "circular"])
def test_tokens_may_be_divided_beside_rows(engine: str):
    mesh = {"data": 2, "context": 2} | ({} if engine == "unpipelined" else STAGES)
    pipe = pipeline(engine, partial(layer, D), mesh, sequence_dim=1)
    assert pipe.check(params(D), batch()).largest <= 1e-5


@pytest.mark.parametrize(
    ("engine", "mesh", "groups", "model"),
    [
        ("unpipelined", {"data": 2, "tensor": 2}, 2, {}),
        ("mpmd", STAGES | {"data": 2, "context": 2}, 2, {"sequence_dim": 2}),
        ("mpmd", STAGES | {"fsdp": 2, "expert": 2}, D, {}),
        ("unpipelined", {"context": 2, "tensor": 2}, 1, {"sequence_dim": 1}),
        ("circular", STAGES | {"context": 2, "expert": 2}, 1, {"sequence_dim": 1}),
    ],
)
def test_a_convolution_whose_gradient_would_be_wrong_is_refused(
    engine: str, mesh: Any, groups: int, model: Any
):
    pipe = pipeline(engine, partial(layer, groups), mesh, **model)
    stored = pipe.shard(params(groups))
    for gradients in (pipe.value_and_grad, jax.grad(lambda *args: pipe.value(*args)[0])):
        if engine == "mpmd" and gradients is not pipe.value_and_grad:
            continue  # which refuses it
        with pytest.raises(ValueError, match=r"`layer` has a convolution.*\(test_windows.py:\d+\)"):
            pipe.jit(gradients)(stored, batch())
    assert np.isfinite(float(pipe.jit(pipe.value)(stored, batch())[0]))


@pytest.mark.parametrize(
    ("engine", "width", "mesh"),
    [
        ("unpipelined", 2, {"context": 2}),
        ("circular", 2, STAGES | {"context": 2}),
        ("mpmd", 2, STAGES | {"context": 2}),
        ("unpipelined", 3, {"data": 2, "tensor": 2}),
        ("circular", 3, STAGES | {"data": 2, "tensor": 2}),
    ],
)
def test_a_maximum_in_windows_has_the_plain_gradient_or_is_refused(
    engine: str, width: int, mesh: Any
):
    """Windows that overlap, over tokens that `context` divides, are refused."""
    for stride in (width, 1) if width == 2 else (1,):
        of_tokens = {"sequence_dim": 1} if "context" in mesh else {}
        pipe = pipeline(engine, partial(pooling, width, stride), mesh, **of_tokens)
        if stride < width and of_tokens:
            with pytest.raises(ValueError, match=r"`layer` has a maximum in .*\(test_wind"):
                pipe.check(params(1), batch())
        else:
            assert pipe.check(params(1), batch()).largest <= 1e-5


@pytest.mark.parametrize(("groups", "spec"), [(D, P("data")), (1, P(None, "data"))])
def test_xla_still_makes_them_wrong(groups: int, spec: P):
    """Once this fails on every version of JAX that we support, the refusal can go."""
    mesh = jp.make_mesh({"data": 2, "tensor": 2}, devices=jax.devices()[:4])
    kernel, x = params(groups)["layers"]["kernel"][0], batch()["x"]
    gradient = jax.jit(jax.grad(lambda k, x: jnp.sum(jnp.tanh(convolved(k, x, groups)))))
    whole = gradient(kernel, x)
    divided = gradient(
        jax.device_put(kernel, NamedSharding(mesh, P())),
        jax.device_put(x, NamedSharding(mesh, spec)),
    )
    np.testing.assert_allclose(divided, 2 * whole, rtol=1e-4, atol=1e-5)


def test_xla_still_loses_a_part_of_the_gradient_of_a_maximum():
    mesh = jp.make_mesh({"context": 2}, devices=jax.devices()[:2])
    gradient = jax.jit(
        jax.grad(lambda x: jnp.sum(jnp.tanh(pooled(x, 2, 1)) * jnp.arange(float(D))))
    )
    x = batch()["x"]
    divided = gradient(jax.device_put(x, NamedSharding(mesh, P(None, "context"))))
    assert np.abs(gradient(x) - divided).max() > 0.1
