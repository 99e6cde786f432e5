"""The matrix products of layers in FP8, against the same written out with NumPy's FP8 types."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpipe import sharding
from jaxpipe.models.layers import fp8_projection, projection, quantize

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
SHAPES = {
    "a matrix": ((4, 8, 16), (16, 24)),
    "to heads": ((4, 8, 16), (16, 2, 4)),
    "from heads": ((4, 8, 2, 4), (2, 4, 16)),
}


def inputs(shapes, dtype=jnp.float32):
    """x, w and dy; tokens and outputs differ in size by much."""
    x_shape, w_shape = shapes
    y_shape = (*x_shape[:2], *w_shape[len(x_shape) - 2 :])
    keys = jax.random.split(jax.random.key(0), 5)
    x, w, dy = (
        jax.random.normal(k, s) for k, s in zip(keys, (x_shape, w_shape, y_shape), strict=False)
    )
    tokens = jnp.exp(3 * jax.random.normal(keys[3], (*x_shape[:2], *[1] * (dy.ndim - 2))))
    outputs = jnp.exp(3 * jax.random.normal(keys[4], w_shape[len(x_shape) - 2 :]))
    return x.astype(dtype), (w * outputs).astype(dtype), (dy * tokens).astype(dtype)


@functools.partial(jax.jit, static_argnums=0)
def run(project, x, w, dy):
    """(y, dx, dw)"""
    y, pull = jax.vjp(project, x, w)
    return y, *pull(dy)


def rounded(x, dtype, dims):
    """FP8 values as float64, and the power of two that all of `dims` share."""
    largest = np.max(np.abs(x), axis=dims, keepdims=True)
    scale = 2.0 ** (np.floor(np.log2(largest / float(ml_dtypes.finfo(dtype).max))) + 1)
    return (x / scale).astype(np.float32).astype(dtype).astype(np.float64), scale


def obvious(x, w, dy):
    """`run` in float64, with what is multiplied rounded to FP8."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    tokens, ins, outs = (0, 1), tuple(range(x.ndim - 2)), tuple(range(2, dy.ndim))
    qx, of_tokens = rounded(x, E4M3, tuple(range(2, x.ndim)))
    qw, of_outputs = rounded(w, E4M3, ins)
    y = np.tensordot(qx * of_tokens, qw * of_outputs, axes=len(ins))
    # What a gradient is summed over has scales too. They go into it before it is rounded.
    g, scale = rounded(dy * of_outputs.reshape(dy.shape[2:]), E5M2, outs)
    of_outs = (outs, tuple(range(len(ins), w.ndim)))
    dx = np.tensordot(g * scale, qw, axes=of_outs)
    g, scale = rounded(dy * of_tokens.reshape(*x.shape[:2], *[1] * len(outs)), E5M2, tokens)
    dw = np.tensordot(qx, g * scale, axes=(tokens, tokens))
    return y, dx, dw


def assert_close(a, b, tolerance=1e-5):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    assert a.shape == b.shape
    assert np.max(np.abs(a - b)) <= tolerance * np.max(np.abs(b))


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_fp8_is_the_product_of_rounded_numbers_and_so_are_its_derivatives(shapes):
    arguments = inputs(shapes)
    found = run(fp8_projection, *arguments)
    for a, b in zip(found, obvious(*arguments), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_fp8_is_near_the_plain_product(shapes):
    arguments = inputs(shapes)
    plain = run(projection, *arguments)
    for a, b in zip(run(fp8_projection, *arguments), plain, strict=True):
        assert a.dtype == b.dtype
        error = jnp.linalg.norm(a - b) / jnp.linalg.norm(b)
        assert 1e-3 < error < 0.15  # e4m3 keeps 4 significant bits, e5m2 3


def test_the_program_multiplies_8_bit_numbers_and_adds_in_float32():
    arguments = inputs(SHAPES["a matrix"], jnp.bfloat16)
    lowered = run.lower(fp8_projection, *arguments)
    products = re.findall(r"dot_general.*: \((.*), (.*)\) -> (.*)", lowered.as_text())
    types = sorted(tuple(re.split("[x>]", t)[-2] for t in product) for product in products)
    assert types == [
        ("f8E4M3FN", "f8E4M3FN", "f32"),
        ("f8E4M3FN", "f8E5M2", "f32"),
        ("f8E5M2", "f8E4M3FN", "f32"),
    ]
    y, dx, dw = run(fp8_projection, *arguments)
    assert y.dtype == dx.dtype == dw.dtype == jnp.bfloat16


def test_the_backward_keeps_activations_in_8_bits_and_the_weight_itself():
    x, w, _ = inputs(SHAPES["a matrix"], jnp.bfloat16)
    _, pull = jax.vjp(fp8_projection, x, w)
    kept = sorted((a.shape, str(a.dtype)) for a in jax.tree.leaves(pull))
    scale = ((*x.shape[:2], 1), "float32")
    assert kept == sorted([(x.shape, "float8_e4m3fn"), scale, (w.shape, "bfloat16")])


def test_a_token_does_not_depend_on_the_others():
    x, w, dy = inputs(SHAPES["a matrix"])
    y, dx, _ = run(fp8_projection, x, w, dy)
    louder = jnp.array([1.0, 1e6, 1.0, 1.0])[:, None, None]
    y_of_others, dx_of_others, _ = run(fp8_projection, x * louder, w, dy * louder)
    others = jnp.array([0, 2, 3])
    assert jnp.array_equal(y[others], y_of_others[others])
    assert jnp.array_equal(dx[others], dx_of_others[others])


def test_devices_with_rows_of_their_own_compute_what_one_device_does():
    """The weight's gradient too: its scale is that of all rows, through a `pmax`."""
    arguments = inputs(SHAPES["to heads"])
    mesh = sharding.make_mesh({"stage": 1, "fsdp": 4}, devices=jax.devices()[:4])

    def on_rows(x, w, dy):
        w = jax.lax.pcast(w, "fsdp", to="varying")
        y, dx, dw = run(fp8_projection, x, w, dy)
        return y, dx, jax.lax.psum(dw, "fsdp")

    rows, whole = P("fsdp"), P()
    split = jax.shard_map(
        on_rows,
        mesh=mesh,
        axis_names={"fsdp"},
        in_specs=(rows, whole, rows),
        out_specs=(rows, rows, whole),
    )
    y, dx, dw = jax.jit(split)(*arguments)
    true = run(fp8_projection, *arguments)
    assert jnp.array_equal(y, true[0])
    assert jnp.array_equal(dx, true[1])
    assert_close(dw, true[2], 1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-30, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_a_scale_is_the_smallest_power_of_two_that_lets_nothing_overflow(size, dtype):
    x = size * jax.random.normal(jax.random.key(0), (4, 64))
    values, scale = quantize(x, dtype, over=(1,))
    largest = jnp.max(jnp.abs(values.astype(jnp.float32)), axis=1)
    limit = float(jnp.finfo(dtype).max)
    assert jnp.all(jnp.frexp(scale)[0] == 0.5)
    assert jnp.all(largest <= limit)
    if size >= 1e-30:
        assert jnp.all(largest > limit / 2 * 0.9)


def test_what_is_not_finite_stays_so():
    x = jnp.ones((2, 3, 4)).at[1, 2, 3].set(jnp.nan).at[0, 0, 0].set(jnp.inf)
    y = fp8_projection(x, jnp.ones((4, 4)))
    finite = jnp.all(jnp.isfinite(y), axis=-1)
    assert finite.tolist() == [[False, True, True], [True, True, False]]
