"""Multi-head latent attention: keys and values are computed from one narrow vector per token.

Position is separate from content. A few channels of each query, and one key for all heads, have
rotary positions. The other channels have none, so that inference has to store only the narrow
vector and that key. DeepSeek-AI, 2024, arXiv 2405.04434, section 2.1.

A slice of a sequence attends to the latents of its past: the products with `key_up` and `value_up`
are taken out of the sum over keys, so that no key or value of an earlier token is computed again.

b sequences, T tokens, D embed, H heads, Q width of compressed queries, R of compressed keys and
values, N channels of a head without position, P with it, C = N + P, V channels of a value head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PyTree

from ...autodiff.staged_model import Past
from ...kernels import Attention, attend_to_past
from ...sharding import Constrain
from ..weights._abstract import matrix, scale
from ._common import HEADS, Frequencies, Rope, name_qkv, rms_norm, rope, rope_frequencies
from ._projection import Projection, projection
from ._yarn import Yarn, yarn_frequencies, yarn_score_scale


@dataclass(frozen=True)
class LatentAttentionSettings:
    """Sizes and positions of latent attention."""

    embed_dim: int  # D
    num_heads: int  # H. Every query head has its own key head and value head.
    q_lora_rank: int  # Q; 0 if queries are not compressed
    kv_lora_rank: int  # R
    qk_nope_head_dim: int  # N
    qk_rope_head_dim: int  # P, an even number. All key heads share these channels.
    v_head_dim: int
    max_timescale: float  # the base of the rotary angles
    yarn: Yarn | None  # stretches the rotary angles; None for angles as trained
    epsilon: float  # added to the mean square in RMSNorm

    @property
    def head_dim(self) -> int:
        """Returns C, the number of channels of a query and key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def score_products(self) -> int:
        """Returns the multiply-adds of a token for each position that it attends to."""
        return self.num_heads * (self.head_dim + self.v_head_dim)


def latent_attention_weights(
    settings: LatentAttentionSettings, *, branches: int, dtype: Any
) -> PyTree:
    """Returns the abstract weights of latent attention.

    The published models store `kv_down` and `rope_key` in one matrix, and `key_up` and `value_up`
    in another. The initial variance of `out` is inversely proportional to `branches`.
    """
    D, H, R = settings.embed_dim, settings.num_heads, settings.kv_lora_rank
    N, P, V = settings.qk_nope_head_dim, settings.qk_rope_head_dim, settings.v_head_dim
    return _query_weights(D, H, settings.q_lora_rank, N + P, dtype) | {
        "kv_down": matrix((D, R), ("embed", "kv_lora"), D, dtype),
        "kv_norm": scale(R, dtype),
        "rope_key": matrix((D, P), ("embed", "kv"), D, dtype),
        "key_up": matrix((R, H, N), ("kv_lora", "q_heads", "kv"), R, dtype),
        "value_up": matrix((R, H, V), ("kv_lora", "q_heads", "kv"), R, dtype),
        "out": matrix((H, V, D), ("q_heads", "kv", "embed"), H * V * branches, dtype),
    }


def _query_weights(D: int, H: int, Q: int, C: int, dtype: Any) -> dict[str, Any]:
    if not Q:
        return {"query": matrix((D, H, C), ("embed", "q_heads", "kv"), D, dtype)}
    return {
        "query_down": matrix((D, Q), ("embed", "q_lora"), D, dtype),
        "query_norm": scale(Q, dtype),
        "query_up": matrix((Q, H, C), ("q_lora", "q_heads", "kv"), Q, dtype),
    }


def latent_attention(
    settings: LatentAttentionSettings,
    *,
    attention: Attention,
    constrain: Constrain,
    project: Projection = projection,
    rotate: Rope = rope,
) -> Callable[..., Any]:
    """Returns latent attention as a function `(weights, x, batch_inputs) -> y`.

    With the `Past` of earlier slices as a fourth argument it returns `(y, past)`.
    """
    frequencies, sharper = _positions(
        settings.qk_rope_head_dim, settings.max_timescale, settings.yarn
    )
    epsilon, num_nope = settings.epsilon, settings.qk_nope_head_dim

    def queries(w: PyTree, x: Float[Array, "b T D"]) -> Array:
        if not settings.q_lora_rank:
            return project(x, w["query"])
        latent = rms_norm(project(x, w["query_down"]), w["query_norm"], epsilon)
        return project(checkpoint_name(latent, "mla_q"), w["query_up"])

    def shared_key(w: PyTree, x: Float[Array, "b T D"], positions: Int[Array, "b T"]) -> Array:
        return rotate(project(x, w["rope_key"])[:, :, None], positions, frequencies)

    def attend(
        w: PyTree, x: Float[Array, "b T D"], batch_inputs: PyTree, past: Past | None = None
    ) -> Any:
        positions: Int[Array, "b T"] = batch_inputs["positions"]
        plain, turned = jnp.split(queries(w, x), [num_nope], axis=-1)
        q = jnp.concatenate([plain, rotate(turned, positions, frequencies)], axis=-1) * sharper

        latent = rms_norm(project(x, w["kv_down"]), w["kv_norm"], epsilon)
        latent = checkpoint_name(latent, "mla_kv")
        if past is not None:
            own = latent, shared_key(w, x, positions), batch_inputs["segment_ids"]
            out, past = _attend_to_latents(w, q, own, past, num_nope)
            return project(constrain(out, HEADS), w["out"]), past
        plain, v = (project(latent, w[name]) for name in ("key_up", "value_up"))
        shared = shared_key(w, x, positions)
        shared = jnp.broadcast_to(shared, (*plain.shape[:3], shared.shape[3]))
        k = jnp.concatenate([plain, shared], axis=-1)

        q, k, v = name_qkv(*(constrain(heads, HEADS) for heads in (q, k, v)))
        out = constrain(attention(q, k, v, batch_inputs["segment_ids"]), HEADS)
        y = project(out, w["out"])
        return checkpoint_name(y, "out_proj")

    return attend


def _attend_to_latents(
    w: PyTree,
    q: Float[Array, "b t H C"],
    own: tuple[Float[Array, "b t R"], Float[Array, "b t 1 P"], Int[Array, "b t"]],
    past: Past,
    num_nope: int,
) -> tuple[Float[Array, "b t H V"], Past]:
    """Runs the attention of a slice on the latents, shared keys and documents of its past and own.

    One key, the latent beside the shared key, is that of all heads, and the latent is its value.
    """
    key_up, value_up = (w[name].astype(q.dtype) for name in ("key_up", "value_up"))
    plain, turned = jnp.split(q, [num_nope], axis=-1)
    q_latent = jnp.concatenate([jnp.einsum("bthn,rhn->bthr", plain, key_up), turned], axis=-1)
    (latent, shared, key_segment_ids), past = past.append(own)
    keys = jnp.concatenate([latent[:, :, None], shared], axis=-1)
    mask, scale = past.causal_mask(q.shape[1]), q.shape[3] ** -0.5
    read = attend_to_past(
        q_latent, keys, latent[:, :, None], key_segment_ids, own[2], mask, scale=scale
    )
    return jnp.einsum("bthr,rhv->bthv", read, value_up), past


def _positions(channels: int, max_timescale: float, yarn: Yarn | None) -> tuple[Frequencies, float]:
    """Returns rotary angles per position in radians, and a factor of the attention scores."""
    if yarn is None:
        return rope_frequencies(channels, max_timescale), 1.0
    frequencies = yarn_frequencies(channels, max_timescale, yarn)
    return frequencies, yarn_score_scale(yarn.factor, yarn.mscale)
