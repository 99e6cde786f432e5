"""Kernels of attention and of grouped products on a GPU, beside the same written out in float32."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harness.attention import written_out
from jaxpipe.kernels import Scores, cudnn_attention, pallas_gpu_attention
from jaxpipe.kernels._context import balanced
from jaxpipe.kernels._gpu import cudnn_kernel
from jaxpipe.kernels._scores import Placement
from jaxpipe.models.layers import pallas_gpu_grouped_matmul
from jaxpipe.sharding import DEFAULT_RULES

OF_BFLOAT16 = 1e-2
"""The norm of an error over that of the value: numbers have 8 bits, and probabilities too."""

CAUSAL = Scores()


def check(attend: Callable, *, scores=CAUSAL, rows=2, length=512, channels=64, documents=1):
    """Compares outputs and gradients of `attend(q, k, v, segments)` in bfloat16."""

    def heads(seed: int, count: int) -> jax.Array:
        x = jax.random.normal(jax.random.key(seed), (rows, length, count, channels))
        return x.astype(jnp.bfloat16)

    inputs = heads(0, 4), heads(1, 2), heads(2, 2)
    cotangent = heads(3, 4)
    rng = np.random.default_rng(length)
    cuts = np.sort(rng.integers(1, length, (rows, documents - 1)), axis=1)
    segments = jnp.asarray((np.arange(length)[:, None] >= cuts[:, None]).sum(2), jnp.int32)

    def results(attend, inputs):
        out, pull_back = jax.vjp(lambda *qkv: attend(*qkv, segments), *inputs)
        return out, *pull_back(cotangent.astype(out.dtype))

    with jax.default_matmul_precision("highest"):
        wide = [x.astype(jnp.float32) for x in inputs]
        true = jax.jit(partial(results, partial(written_out, scores=scores)))(wide)
    with jax.numpy_dtype_promotion("standard"):  # jax.nn's attention promotes
        ours = jax.jit(partial(results, attend))(inputs)
    for name, x, expected in zip(
        ("output", "gradient of q", "of k", "of v"), ours, true, strict=True
    ):
        assert error(x, expected) < OF_BFLOAT16, (name, error(x, expected))


def error(x: jax.Array, expected: jax.Array) -> float:
    off = np.asarray(x, np.float64) - np.asarray(expected, np.float64)
    return float(np.linalg.norm(off) / np.linalg.norm(np.asarray(expected, np.float64)))


@pytest.mark.parametrize("channels", [64, 128, 192, 256])
@pytest.mark.parametrize(
    "scores", [CAUSAL, Scores(causal=False), Scores(window=100), Scores(scale=0.3)], ids=str
)
@pytest.mark.parametrize("documents", [1, 5])
def test_cudnn(channels: int, scores: Scores, documents: int):
    attend = cudnn_attention(DEFAULT_RULES, scores, packed=documents > 1)
    check(attend, scores=scores, channels=channels, documents=documents)


@pytest.mark.parametrize("length", [64, 192, 320, 448, 200, 1000])
@pytest.mark.parametrize("documents", [1, 5])
def test_cudnn_with_parts_of_a_block(length: int, documents: int):
    check(cudnn_attention(DEFAULT_RULES, packed=documents > 1), length=length, documents=documents)


LENGTH = 512


def in_order(size: int, device: int) -> Placement:
    return Placement(LENGTH * np.arange(size)[:, None], LENGTH, size * LENGTH, device)


def of_equal_work(size: int, device: int) -> Placement:
    return balanced(LENGTH, size, device)


PLACED = {"in order": in_order, "of equal work": of_equal_work}


@pytest.mark.parametrize("documents", [1, 5])
@pytest.mark.parametrize(
    ("size", "scores", "placed"),
    [
        *((size, CAUSAL, "of equal work") for size in (2, 4)),
        *((size, CAUSAL, "in order") for size in (2, 3)),
        *((size, Scores(causal=False), "in order") for size in (2, 3)),
        *((size, Scores(window=700), "in order") for size in (2, 3)),
    ],
    ids=str,
)
def test_cudnn_on_slices(size: int, scores: Scores, placed: str, documents: int):
    """One GPU computes the slices of all devices, each from what its device would be sent."""

    def attend(q, k, v, segments):
        out = jnp.zeros_like(q)
        for device in range(size):
            where = PLACED[placed](size, device)
            own = where.indices()
            of_own = q[:, own], k, v, None, (segments[:, own], segments), where
            part = cudnn_kernel(scores, *of_own, packed=documents > 1)
            out = out.at[:, own].set(part)
        return out

    check(attend, scores=scores, length=LENGTH * size, documents=documents)


@pytest.mark.parametrize("channels", [64, 128, 192, 256])
@pytest.mark.parametrize("documents", [1, 5])
@pytest.mark.parametrize("causal", [True, False])
def test_pallas(channels: int, documents: int, causal: bool):
    scores = Scores(causal=causal)
    attend = pallas_gpu_attention(DEFAULT_RULES, scores)
    check(attend, scores=scores, channels=channels, documents=documents)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "sizes", [(140, 0, 33, 90), (0, 0, 0, 300), (1000, 24, 1024, 1000), (7,) * 64], ids=str
)
def test_grouped_products(dtype: str, sizes: tuple[int, ...]):
    depth, width, spare = 200, 328, 37
    num_rows = sum(sizes) + spare
    keys = jax.random.split(jax.random.key(len(sizes)), 3)
    rows = jax.random.normal(keys[0], (num_rows, depth)).astype(dtype)
    weights = jax.random.normal(keys[1], (len(sizes), depth, width)).astype(dtype)
    cotangent = jax.random.normal(keys[2], (num_rows, width)).astype(dtype)
    cotangent = cotangent.at[sum(sizes) :].set(0)

    def of_each_group(rows, weights):
        cuts = np.cumsum([0, *sizes])
        parts = [rows[cuts[g] : cuts[g + 1]] @ weights[g] for g in range(len(sizes))]
        return jnp.concatenate([*parts, jnp.zeros((spare, width), rows.dtype)])

    def results(product, *inputs):
        out, pull_back = jax.vjp(product, *inputs)
        return out, *pull_back(cotangent.astype(out.dtype))

    with jax.default_matmul_precision("highest"):
        wide = rows.astype(jnp.float32), weights.astype(jnp.float32)
        true = jax.jit(partial(results, of_each_group))(*wide)
    kernel = pallas_gpu_grouped_matmul()
    counts = jnp.array(sizes, jnp.int32)
    ours = jax.jit(partial(results, lambda r, w: kernel(r, w, counts)))(rows, weights)
    most = OF_BFLOAT16 if dtype == "bfloat16" else 2e-3  # TF32 has 10 bits
    for name, x, expected in zip(("products", "of rows", "of weights"), ours, true, strict=True):
        assert math.isfinite(error(x, expected)) and error(x, expected) < most, (
            name,
            error(x, expected),
        )
