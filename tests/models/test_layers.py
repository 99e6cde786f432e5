import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.models.layers import (
    dropout,
    rms_norm,
    rope,
    rope_by_product,
    rope_frequencies,
    token_losses,
)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def close(x, y, rtol: float = 1e-5, atol: float = 1e-6):
    np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


def test_rms_norm_divides_by_the_root_of_the_mean_square():
    x, scale = 3 * normal(0, 2, 5, 8), normal(1, 8)
    expected = np.empty(x.shape, np.float32)
    for i in np.ndindex(2, 5):
        expected[i] = x[i] / math.sqrt(np.mean(np.square(x[i])) + 0.01) * np.asarray(scale)
    close(rms_norm(x, scale, 0.01), expected)


def test_rms_norm_computes_in_float32_and_returns_what_it_was_given():
    # The square of this overflows in float16, and the mean loses digits in bfloat16.
    x = jnp.full((1, 256), 300.0, jnp.float16)
    out = rms_norm(x, jnp.full(256, 2.0, jnp.float16), 1e-6)
    assert out.dtype == jnp.float16
    close(out.astype(jnp.float32), np.full((1, 256), 2.0), rtol=1e-3)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_scores_of_turned_heads_depend_on_the_distance_of_positions_alone(i: int, j: int, by: int):
    q, k = normal(0, 1, 1, 2, 16), normal(1, 1, 1, 2, 16)
    frequencies = rope_frequencies(16, 10_000.0)

    def scores(i: int, j: int) -> jax.Array:
        turned = (rope(x, jnp.array([[at]], jnp.int32), frequencies) for x, at in ((q, i), (k, j)))
        return jnp.einsum("bthc,bthc->bth", *turned)

    close(scores(i, j), scores(i + by, j + by), rtol=1e-3, atol=2e-3)  # float32 angles of 1,000


def test_heads_are_turned_pair_by_pair():
    x = normal(0, 1, 3, 1, 8)
    out = rope(x, jnp.array([[0, 1, 7]], jnp.int32), rope_frequencies(8, 100.0))
    expected = np.empty((1, 3, 1, 8), np.float32)
    for t, position in enumerate((0, 1, 7)):
        for pair in range(4):
            turn = np.exp(1j * position * 100.0 ** (-2 * pair / 8))
            z = complex(x[0, t, 0, pair], x[0, t, 0, pair + 4]) * turn
            expected[0, t, 0, pair], expected[0, t, 0, pair + 4] = z.real, z.imag
    close(out, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_that_exchanges_halves_turns_heads_as_well(dtype: str):
    x, dout = (normal(seed, 2, 5, 3, 8).astype(dtype) for seed in (0, 1))
    positions = jnp.array([[0, 1, 7, 8, 20]] * 2, jnp.int32)

    def value_and_gradient(turn):
        out, pull = jax.vjp(lambda x: turn(x, positions, rope_frequencies(8, 100.0)), x)
        return out.astype(jnp.float32), pull(dout)[0].astype(jnp.float32)

    rtol = 1e-6 if dtype == "float32" else 2**-6
    for ours, plain in zip(*map(value_and_gradient, (rope_by_product, rope)), strict=True):
        close(ours, plain, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama31_frequencies_are_the_published_piecewise_ones(factor: float):
    """Meta's `apply_scaling` of llama-models, value by value."""
    expected = []
    for i in range(0, 128, 2):
        frequency = 500_000.0 ** (-i / 128)
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            expected.append(frequency)
        elif wavelength > 8192 / 1:
            expected.append(frequency / factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) * frequency / factor + smooth * frequency)
    close(rope_frequencies(128, 500_000.0, llama31_factor=factor), expected, atol=0)
    assert len({round(f * 500_000 ** (i / 64), 4) for i, f in enumerate(expected)}) > 3


def test_dropout_keeps_the_mean_and_scales_what_it_keeps():
    x = jnp.full(100_000, 3.0)
    out = np.asarray(dropout(x, 0.25, jax.random.key(0)))
    assert set(out.tolist()) == {0.0, 4.0}
    np.testing.assert_allclose(out.mean(), 3.0, rtol=0.01)


@pytest.mark.parametrize(("rate", "key"), [(0.5, ()), (0.0, jax.random.key(0))])
def test_dropout_without_a_key_or_a_rate_does_nothing(rate: float, key):
    x = normal(0, 4)
    assert dropout(x, rate, key) is x


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_loss_of_a_token_is_minus_its_log_softmax(dtype):
    logits = (5 * normal(0, 2, 3, 11)).astype(dtype)
    targets = jax.random.randint(jax.random.key(1), (2, 3), 0, 11)
    losses, hits, _ = token_losses(logits, targets)
    log_probabilities = np.asarray(jax.nn.log_softmax(logits.astype(jnp.float32)))
    assert losses.dtype == hits.dtype == jnp.float32
    for i in np.ndindex(2, 3):
        close(losses[i], -log_probabilities[i][int(targets[i])])
        assert bool(hits[i]) == (np.argmax(log_probabilities[i]) == int(targets[i]))


def test_the_gradient_of_a_loss_is_softmax_minus_one_hot():
    logits, targets = normal(0, 1, 2, 5), jnp.array([[1, 4]])
    gradient = jax.grad(lambda x: token_losses(x, targets)[0].sum())(logits)
    close(gradient, jax.nn.softmax(logits) - np.eye(5)[targets])
