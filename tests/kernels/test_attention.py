import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.kernels import dot_product_attention
from jaxpipe.kernels._dot_product import causal_mask


def heads(seed: int, length: int, count: int, rows: int = 2) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (rows, length, count, 8))


def obvious_attention(q, k, v, segment_ids) -> jax.Array:
    """Every query head for itself, with its softmax written out."""
    per_head = q.shape[2] // k.shape[2]
    outs = []
    for h in range(q.shape[2]):
        scores = jnp.einsum("btc,bsc->bts", q[:, :, h], k[:, :, h // per_head])
        weights = jnp.exp(scores / math.sqrt(q.shape[3]))
        weights = jnp.where(causal_mask(segment_ids)[:, 0], weights, 0.0)
        weights /= weights.sum(-1, keepdims=True)
        outs.append(jnp.einsum("bts,bsc->btc", weights, v[:, :, h // per_head]))
    return jnp.stack(outs, axis=2)


def close(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * np.abs(y).max())


def test_the_mask_is_that_of_the_obvious_loops():
    segments = jnp.array([[1, 1, 2, 2, 0], [3, 3, 3, 1, 1]], jnp.int32)
    mask = causal_mask(segments)
    assert mask.shape == (2, 1, 5, 5)
    for b, t, s in np.ndindex(2, 5, 5):
        assert mask[b, 0, t, s] == (s <= t and segments[b, s] == segments[b, t])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_and_its_gradients_are_those_of_an_explicit_softmax(kv_heads: int):
    q, k, v = heads(0, 12, 4), heads(1, 12, kv_heads), heads(2, 12, kv_heads)
    segments = jnp.array([[1] * 5 + [2] * 7, [1] * 9 + [0] * 3], jnp.int32)

    def loss(attention):
        return lambda *qkv: jnp.sum(jnp.sin(attention(*qkv, segments)))

    close(dot_product_attention(q, k, v, segments), obvious_attention(q, k, v, segments))
    gradients, expected = (
        jax.jit(jax.grad(loss(f), argnums=(0, 1, 2)))(q, k, v)
        for f in (dot_product_attention, obvious_attention)
    )
    for gradient, true in zip(gradients, expected, strict=True):
        close(gradient, true)


def test_a_packed_row_attends_like_its_documents_run_separately():
    """Outputs and gradients: nothing leaks from one document into the other."""
    lengths = (5, 7)
    qkv = heads(0, 12, 4, rows=1), heads(1, 12, 2, rows=1), heads(2, 12, 2, rows=1)
    segments = jnp.repeat(jnp.array([1, 2], jnp.int32), jnp.array(lengths), total_repeat_length=12)

    def packed(qkv):
        q, k, v = qkv
        return dot_product_attention(q, k, v, segments[None])

    def separate(qkv):
        parts = []
        for start, stop in ((0, 5), (5, 12)):
            ones = jnp.ones((1, stop - start), jnp.int32)
            q, k, v = (x[:, start:stop] for x in qkv)
            parts.append(dot_product_attention(q, k, v, ones))
        return jnp.concatenate(parts, axis=1)

    close(packed(qkv), separate(qkv))
    gradients, expected = (
        jax.jit(jax.grad(lambda qkv, f=f: jnp.sum(jnp.sin(f(qkv)))))(qkv)
        for f in (packed, separate)
    )
    for gradient, true in zip(gradients, expected, strict=True):
        close(gradient, true)
