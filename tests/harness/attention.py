"""Attention as a softmax that is written out, which tests of kernels compare with."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.kernels import Scores


def written_out(q, k, v, segment_ids, scores: Scores, sinks=None) -> jax.Array:
    """Computes every query head for itself, each with the softmax over its keys."""
    length = q.shape[1]
    distance = np.arange(length)[:, None] - np.arange(length)[None]
    seen = np.ones((length, length), bool)
    if scores.causal:
        seen &= distance >= 0
    if scores.window is not None:
        seen &= np.abs(distance) < scores.window
    seen = seen[None] & (segment_ids[:, :, None] == segment_ids[:, None, :])
    outs = []
    for h in range(q.shape[2]):
        group = h // (q.shape[2] // k.shape[2])
        logits = jnp.einsum("btc,bsc->bts", q[:, :, h], k[:, :, group])
        logits *= q.shape[3] ** -0.5 if scores.scale is None else scores.scale
        if scores.soft_cap is not None:
            logits = scores.soft_cap * jnp.tanh(logits / scores.soft_cap)
        weights = jnp.where(seen, jnp.exp(logits), 0.0)
        total = weights.sum(-1, keepdims=True)
        if sinks is not None:
            total += jnp.exp(sinks[h])
        outs.append(jnp.einsum("bts,bsc->btc", weights / total, v[:, :, group]))
    return jnp.stack(outs, axis=2)
