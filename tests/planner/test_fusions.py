"""Memory and time of layers of users, beside the programs of XLA:TPU and XLA:GPU."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxpipe as jp
from jaxpipe.planner._fusions import fused_layer
from planner.layers_of_users import LAYERS, Layer, shape

# What the rules of fusions say of what compiles, on TPUs and GPUs, where that is not 1.
OFF = {
    "gated MLP": (1.0, 1.2),
    "shifts": (0.75, 0.83),
    "loop over tokens": (0.75, 0.65),  # by 0.06 more as jax 0.10.2 traces it, less by 0.11.2
    "linear attention": (0.83, 0.81),
    "float32": (1.31, 1.42),
    "four MLPs": (1.0, 0.85),
    "mixer": (0.82, 1.0),
    "every expert": (2.07, 0.62),
}


def planned(layer: Layer, *, on_gpu: bool = False) -> float:
    rows = [
        (jax.ShapeDtypeStruct((n, layer.tokens, layer.channels), jnp.bfloat16), (), ())
        for n in (2, 3)
    ]
    with jax.numpy_dtype_promotion("standard"):
        fused = fused_layer(
            lambda w, x, batch, key: layer.run(w, x), layer.weights, *rows, on_gpu=on_gpu
        )
    return fused.live / (2 * layer.tokens * layer.channels)


@pytest.mark.parametrize("name", LAYERS)
def test_what_lives_beside_what_xla_holds(name: str):
    layer = LAYERS[name]
    ratios = planned(layer) / layer.on_tpu, planned(layer, on_gpu=True) / layer.on_gpu
    assert ratios == pytest.approx(OFF.get(name, (1.0, 1.0)), abs=0.08)


# Planned times over cycles. Products of linear attention are small, loops wait for each other.
OFF_IN_TIME = {"GPT of 4,096 tokens": 1.24, "every expert": 1.23, "linear attention": 0.45}


def milliseconds_of(run: Any, weights: dict[str, Any], dims: tuple[int, ...], rows: int) -> float:
    """Plans a step of four layers on one v5p, each computed again; dims are those of a row of x."""
    model = jp.Model(
        lambda scale, batch: batch["x"] * scale.astype(jnp.bfloat16),
        layer=lambda w, x, batch: run(w, x),
        loss=lambda scale, x, batch: jnp.mean(jnp.square(x).astype(jnp.float32) * scale),
    )
    params = {"embed": shape(dims[-1]), "layers": weights, "head": shape(dims[-1])}
    x = jax.ShapeDtypeStruct((1, *dims), jnp.bfloat16)
    given: dict[str, Any] = {"params": params, "example": {"x": x}, "memory_gb": 1000}
    how: dict[str, Any] = {"layer_remat": "full", "scan_layers": 1, "microbatches": 1}
    best = jp.plan(model, "v5p-2", rows, **given, **how, schedule=None, num_plans=1).best
    return 1e3 * best.time.seconds


@pytest.mark.parametrize("name", sorted(LAYERS.keys() - {"loop over tokens"}))
def test_steps_beside_the_cycles_of_xla(name: str):
    layer = LAYERS[name]
    weights = {name: shape(4, *w.shape) for name, w in layer.weights.items()}
    with jax.numpy_dtype_promotion("standard"):
        found = milliseconds_of(layer.run, weights, (layer.tokens, layer.channels), rows=16)
    ratio = found / layer.milliseconds
    assert ratio == pytest.approx(OFF_IN_TIME.get(name, 1.0), abs=0.16)


def test_a_layer_whose_operations_depend_on_the_rows_is_refused():
    def layer(w: jax.Array, x: jax.Array, batch: tuple, key: tuple) -> jax.Array:
        return jnp.tanh(x @ w) if len(x) % 2 else x @ w

    rows = [(jax.ShapeDtypeStruct((n, 16, 8), jnp.float32), (), ()) for n in (2, 3)]
    with pytest.raises(ValueError, match="operations of a layer depend on how many rows"):
        fused_layer(layer, jax.ShapeDtypeStruct((8, 8), jnp.float32), *rows)


def _convolve(x: jax.Array, kernel: jax.Array, groups: int = 1) -> jax.Array:
    dims = "NHWC", "HWIO", "NHWC"
    how: dict[str, Any] = {"dimension_numbers": dims, "feature_group_count": groups}
    return jax.lax.conv_general_dilated(x, kernel.astype(x.dtype), (1, 1), "SAME", **how)


def _normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)
    return (y * scale).astype(x.dtype)


def _two_convolutions(w: Any, x: jax.Array) -> jax.Array:
    return x + _convolve(jax.nn.relu(_convolve(jax.nn.relu(x), w["a"])), w["b"])


def _normed_convolutions(w: Any, x: jax.Array) -> jax.Array:
    y = _convolve(jax.nn.silu(_normed(x, w["s"])), w["a"])
    return x + _convolve(jax.nn.silu(_normed(y, w["t"])), w["b"])


def _convnext(w: Any, x: jax.Array) -> jax.Array:
    """A block of Liu et al., 2022 (https://arxiv.org/abs/2201.03545), without its scale."""
    y = _normed(_convolve(x, w["dw"], x.shape[-1]), w["s"])
    return x + jax.nn.gelu(y @ w["u"].astype(x.dtype)) @ w["d"].astype(x.dtype)


_KERNELS = {name: shape(4, 3, 3, 512, 512) for name in "ab"}
_UP_DOWN = {"u": shape(4, 512, 2048), "d": shape(4, 2048, 512)}
# Milliseconds of a step of four layers and 64 images of 32 x 32 on one v5p, by cycles.
CONVOLUTIONS = {
    "two": (_two_convolutions, _KERNELS, 20.74),
    "normed": (_normed_convolutions, _KERNELS | {k: shape(4, 512) for k in "st"}, 25.53),
    "convnext": (_convnext, _UP_DOWN | {"dw": shape(4, 7, 7, 1, 512), "s": shape(4, 512)}, 30.17),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_beside_the_cycles_of_xla(name: str):
    """A depthwise one takes the time of 128 channels in each group: 28 ps a number for 7 x 7."""
    layer, weights, milliseconds = CONVOLUTIONS[name]
    found = milliseconds_of(layer, weights, (32, 32, 512), rows=64)
    assert found == pytest.approx(milliseconds, rel=0.14)
