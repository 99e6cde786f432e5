"""Multi-head latent attention: keys and values are computed from one narrow vector per token.

Position is separate from content. A few channels of each query, and one key for all heads, have
rotary positions. The other channels have none, so that inference has to store only the narrow
vector and that key. DeepSeek-AI, 2024, arXiv 2405.04434, section 2.1.

b sequences, T tokens, D embed, H heads, Q width of compressed queries, R of compressed keys and
values, N channels of a head without position, P with it, C = N + P, V channels of a value head.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PyTree

from ...sharding._rules import Constrain
from .._deepseek_config import DeepseekConfig
from ..weights._abstract import matrix, scale
from ._attention import Attention
from ._common import HEADS, name_qkv, rms_norm, rope, rope_frequencies
from ._projection import Projection, projection
from ._yarn import yarn_frequencies, yarn_score_scale


def latent_attention_weights(config: DeepseekConfig, *, branches: int, dtype: Any) -> PyTree:
    """Returns the abstract weights of latent attention.

    The published models store `kv_down` and `rope_key` in one matrix, and `key_up` and `value_up`
    in another.

    Args:
        config: The sizes of the model.
        branches: The number of residual branches of the model. The initial variance of `out` is
            inversely proportional to it.
        dtype: The dtype in which weights are stored.

    Returns:
        A dict of `Weight`.
    """
    D, H, R = config.base_emb_dim, config.base_num_query_heads, config.kv_lora_rank
    N, P, V = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    return _query_weights(config, dtype) | {
        "kv_down": matrix((D, R), ("embed", "kv_lora"), D, dtype),
        "kv_norm": scale(R, dtype),
        "rope_key": matrix((D, P), ("embed", "kv"), D, dtype),
        "key_up": matrix((R, H, N), ("kv_lora", "q_heads", "kv"), R, dtype),
        "value_up": matrix((R, H, V), ("kv_lora", "q_heads", "kv"), R, dtype),
        "out": matrix((H, V, D), ("q_heads", "kv", "embed"), H * V * branches, dtype),
    }


def _query_weights(config: DeepseekConfig, dtype: Any) -> dict[str, Any]:
    D, H, Q = config.base_emb_dim, config.base_num_query_heads, config.q_lora_rank
    C = config.qk_nope_head_dim + config.qk_rope_head_dim
    if not Q:
        return {"query": matrix((D, H, C), ("embed", "q_heads", "kv"), D, dtype)}
    return {
        "query_down": matrix((D, Q), ("embed", "q_lora"), D, dtype),
        "query_norm": scale(Q, dtype),
        "query_up": matrix((Q, H, C), ("q_lora", "q_heads", "kv"), Q, dtype),
    }


def latent_attention(
    config: DeepseekConfig,
    *,
    attention: Attention,
    constrain: Constrain,
    project: Projection = projection,
) -> Callable[[PyTree, Array, PyTree], Array]:
    """Returns latent attention as a function `(weights, x, batch_inputs) -> y`.

    Args:
        config: The sizes of the model.
        attention: `(q, k, v, segment_ids) -> out` that divides scores by sqrt(C).
        constrain: Shards an activation by its logical axes.
        project: Multiplies activations by a weight.

    Returns:
        The function. x and y are [b, T, D], and `batch_inputs` has `positions` and `segment_ids`
        [b, T].
    """
    frequencies, sharper = _positions(config)
    queries = _compressed if config.q_lora_rank else _direct
    epsilon, num_nope = config.normalization_layer_epsilon, config.qk_nope_head_dim

    def attend(w: PyTree, x: Float[Array, "b T D"], batch_inputs: PyTree) -> Float[Array, "b T D"]:
        positions: Int[Array, "b T"] = batch_inputs["positions"]
        plain, turned = jnp.split(queries(w, x, epsilon, project), [num_nope], axis=-1)
        q = jnp.concatenate([plain, rope(turned, positions, frequencies)], axis=-1) * sharper

        latent = rms_norm(project(x, w["kv_down"]), w["kv_norm"], epsilon)
        latent = checkpoint_name(latent, "mla_kv")
        plain, v = (project(latent, w[name]) for name in ("key_up", "value_up"))
        shared = rope(project(x, w["rope_key"])[:, :, None], positions, frequencies)
        shared = jnp.broadcast_to(shared, (*plain.shape[:3], shared.shape[3]))
        k = jnp.concatenate([plain, shared], axis=-1)

        q, k, v = name_qkv(*(constrain(heads, HEADS) for heads in (q, k, v)))
        out = checkpoint_name(
            constrain(attention(q, k, v, batch_inputs["segment_ids"]), HEADS), "context"
        )
        y = project(out, w["out"])
        return checkpoint_name(y, "out_proj")

    return attend


def _positions(config: DeepseekConfig) -> tuple[Float[np.ndarray, " half"], float]:
    """Returns rotary angles per position in radians, and a factor of the attention scores."""
    channels, base = config.qk_rope_head_dim, config.rope_max_timescale
    if config.rope_type == "default":
        return rope_frequencies(channels, base), 1.0
    frequencies = yarn_frequencies(
        channels,
        base,
        factor=config.rope_factor,
        trained_length=config.original_max_position_embeddings,
        beta_fast=config.beta_fast,
        beta_slow=config.beta_slow,
    )
    return frequencies, yarn_score_scale(config.rope_factor, config.mscale)


def _direct(w: PyTree, x: Float[Array, "b T D"], epsilon: float, project: Projection) -> Array:
    del epsilon
    return project(x, w["query"])


def _compressed(w: PyTree, x: Float[Array, "b T D"], epsilon: float, project: Projection) -> Array:
    latent = rms_norm(project(x, w["query_down"]), w["query_norm"], epsilon)
    return project(checkpoint_name(latent, "mla_q"), w["query_up"])
