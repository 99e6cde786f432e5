"""Attention that stores its scores, on any device: the reference of kernels, and a way out.

b sequences, t queries of u keys, H query heads, K key and value heads, C channels of a query and
key head, V of a value head.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from ._scores import CAUSAL, Placement, Scores, Segments, dense_mask, same_tokens


def causal_mask(segment_ids: Int[Array, "b T"]) -> Bool[Array, "b 1 T T"]:
    """Returns whether each query (dim 2) sees each key (dim 3): its document's up to itself."""
    return dense_mask(CAUSAL, (segment_ids, segment_ids), same_tokens(segment_ids.shape[1]))


def dot_product_attention(
    q: Float[Array, "b T H C"],
    k: Float[Array, "b T K C"],
    v: Float[Array, "b T K V"],
    segment_ids: Int[Array, "b T"],
) -> Float[Array, "b T H V"]:
    """Runs `jax.nn.dot_product_attention` with a causal mask, grouped if K < H, on any device.

    Args:
        q: Queries of H heads, a multiple of K.
        k: Keys, each read by H / K heads of queries.
        v: Values; V is at most C.
        segment_ids: The document of each token: a query sees keys of its own alone.

    Returns:
        What each query reads.
    """
    return _masked_attention(q, k, v, causal_mask(segment_ids), None)


def attend_to_past(
    q: Float[Array, "b t H C"],
    k: Float[Array, "b T K C"],
    v: Float[Array, "b T K V"],
    key_segment_ids: Int[Array, "b T"],
    segment_ids: Int[Array, "b t"],
    mask: Bool[Array, "t T"],
    scale: float | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "b t H V"]:
    """Runs the attention of one slice of each sequence, as `dot_product_attention` does.

    Args:
        q: The queries of the slice.
        k: The keys of all tokens, of which those behind the slice are not seen.
        v: Their values; V is at most C.
        key_segment_ids: The document of each key.
        segment_ids: The document of each query.
        mask: Whether a query sees a key of its document.
        scale: The factor of scores. Default: 1 / sqrt(C).
        sinks: A score of each head that takes a share of the weights and has no value.

    Returns:
        What each query reads.
    """
    same_segment = segment_ids[:, :, None] == key_segment_ids[:, None, :]
    return _attend(Scores(scale=scale), q, k, v, sinks, (same_segment & mask)[:, None])


def dot_product_kernel(
    scores: Scores,
    q: Float[Array, "b t H C"],
    k: Float[Array, "b u K C"],
    v: Float[Array, "b u K V"],
    sinks: Float[Array, " H"] | None,
    segments: Segments | None,
    where: Placement,
) -> Float[Array, "b t H V"]:
    """Runs attention of one device by `jax.nn.dot_product_attention`, or as written."""
    return _attend(scores, q, k, v, sinks, dense_mask(scores, segments, where))


def _attend(
    scores: Scores,
    q: Float[Array, "b t H C"],
    k: Float[Array, "b u K C"],
    v: Float[Array, "b u K V"],
    sinks: Float[Array, " H"] | None,
    mask: Bool[Array, "b 1 t u"],
) -> Float[Array, "b t H V"]:
    """Runs attention to the keys of a mask, whatever window the scores have."""
    if scores.soft_cap is None and sinks is None:
        return _masked_attention(q, k, v, mask, scores.scale)
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    logits = jnp.einsum("btkgc,bukc->bkgtu", grouped, k, preferred_element_type=jnp.float32)
    logits = logits * scores.scale_of(q)
    if scores.soft_cap is not None:
        logits = scores.soft_cap * jnp.tanh(logits / scores.soft_cap)
    logits = jnp.where(mask[:, :, None], logits, -jnp.inf)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    of_sinks = None
    if sinks is not None:
        of_sinks = sinks.astype(jnp.float32).reshape(k.shape[2], -1, 1, 1)
        largest = jnp.maximum(largest, of_sinks)
    largest = jax.lax.stop_gradient(largest)
    weights = jnp.exp(logits - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if of_sinks is not None:  # a sink takes a share of the weights, and has no value
        total = total + jnp.exp(of_sinks - largest)
    weights = (weights / total).astype(v.dtype)
    out = jnp.einsum("bkgtu,bukc->btkgc", weights, v)
    return checkpoint_name(out.reshape(*q.shape[:3], v.shape[3]), "context")


def _masked_attention(q: Array, k: Array, v: Array, mask: Array, scale: float | None) -> Array:
    out = jax.nn.dot_product_attention(q, k, as_wide(v, q), mask=mask, scale=scale)
    return checkpoint_name(out[..., : v.shape[3]], "context")


def as_wide(v: Float[Array, "b u K V"], q: Float[Array, "b t H C"]) -> Float[Array, "b u K C"]:
    """Pads values to the width of queries, which kernels need."""
    return jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, q.shape[3] - v.shape[3])))
