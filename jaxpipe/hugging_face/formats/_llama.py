"""Llama 2 and 3, Mistral, Mixtral and Qwen3 as Hugging Face has them.

Both sides turn the first half of a head's channels against the second, so rotary positions need no
other order. D embed, H query heads, K key and value heads, C channels of a head, E experts.
"""

from collections.abc import Mapping
from typing import Any

from ... import models
from ..._input import short_repr
from ._fields import (
    ConfigFields,
    ConfigValues,
    check_no_problems,
    read_fields,
    read_rope,
    write_fields,
)
from ._tensors import (
    LeafSlices,
    expert_weights,
    linear_weight,
    same_tensor,
    swiglu_weights,
    with_prefix,
)

ATTENTION_SIZES = {
    "hidden_size": "base_emb_dim",
    "num_hidden_layers": "base_num_decoder_layers",
    "num_attention_heads": "base_num_query_heads",
    "num_key_value_heads": "base_num_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "normalization_layer_epsilon",
    "tie_word_embeddings": "logits_via_embedding",
}
"""Fields of every llama, and the keys that they give."""
LLAMA_SIZES = ATTENTION_SIZES | {"intermediate_size": "base_mlp_dim"}
"""Fields of models with an MLP in every layer, and the keys that they give."""
_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_FIXED = {"hidden_act": ("silu",), "attention_dropout": (0.0, None)}
_QWEN3_FIXED = _FIXED | {"attention_bias": (False,), "use_sliding_window": (False,)}
_QWEN3_IGNORED = ("layer_types", "max_window_layers", "sliding_window")
LLAMA_FIELDS = {
    "llama": ConfigFields(
        LLAMA_SIZES, _DEFAULTS, _FIXED | {"attention_bias": (False,), "mlp_bias": (False,)}
    ),
    "mistral": ConfigFields(LLAMA_SIZES, _DEFAULTS, _FIXED | {"sliding_window": (None,)}),
    "qwen3": ConfigFields(LLAMA_SIZES, _DEFAULTS, _QWEN3_FIXED, _QWEN3_IGNORED),
    # transformers' balance loss, of all layers together, is none of ours.
    "mixtral": ConfigFields(
        ATTENTION_SIZES
        | {
            "intermediate_size": "base_moe_mlp_dim",
            "num_local_experts": "num_experts",
            "num_experts_per_tok": "num_experts_per_tok",
        },
        _DEFAULTS | {"rms_norm_eps": 1e-5},
        _FIXED | {"sliding_window": (None,), "router_jitter_noise": (0.0,)},
        ignored=("router_aux_loss_coef",),
    ),
    "qwen3_moe": ConfigFields(
        ATTENTION_SIZES
        | {
            "moe_intermediate_size": "base_moe_mlp_dim",
            "num_experts": "num_experts",
            "num_experts_per_tok": "num_experts_per_tok",
            "norm_topk_prob": "norm_topk_prob",
        },
        _DEFAULTS | {"norm_topk_prob": False},
        _QWEN3_FIXED | {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
        # Without layers that have no experts, nothing is as wide as `intermediate_size`.
        ignored=(*_QWEN3_IGNORED, "intermediate_size", "router_aux_loss_coef"),
    ),
}
"""The fields of each `model_type`, which is the `decoder_block` of ours."""

_DERIVED = {
    "llama": ("num_key_value_heads", "head_dim"),
    "mistral": ("head_dim",),
    "mixtral": ("head_dim",),
    "qwen3_moe": ("head_dim",),
}
"""Fields for which transformers takes a quotient of others if they are missing."""

_EXPERTS = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}
"""The module of a layer with its router and experts, and the matrices of an expert there."""

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_LLAMA3_FIXED = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read_llama(config: Mapping[str, Any], block: str) -> ConfigValues:
    """Returns the config keys of jaxpipe for a config.json."""
    values = read_fields(_without_null(config, block), LLAMA_FIELDS[block])
    types = config.get("layer_types") or []
    check_no_problems(
        [
            f"`layer_types` has {short_repr(kind)}: only 'full_attention' is supported"
            for kind in types
            if kind != "full_attention"
        ]
    )
    if "base_moe_mlp_dim" in values:
        values["base_mlp_dim"] = values["base_moe_mlp_dim"]
    rope = read_rope(
        config,
        defaults={"rope_theta": 1_000_000.0 if block == "mixtral" else 10_000.0},
        types={"default": (), "llama3": _LLAMA3},
    )
    values["rope_max_timescale"] = float(rope["rope_theta"])
    if rope["rope_type"] == "default":
        return values
    check_no_problems(
        [
            f"`{name}` of rotary positions is {rope[name]!r}: only {value!r} is supported"
            for name, value in _LLAMA3_FIXED.items()
            if rope[name] != value
        ]
    )
    return values | {"rope_type": "llama3.1", "llama31_rope_factor": float(rope["factor"])}


def _without_null(config: Mapping[str, Any], block: str) -> ConfigValues:
    """Returns the fields that are not null, with what transformers takes for missing ones."""
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    taken: ConfigValues = {}
    if isinstance(heads, int) and isinstance(width, int) and heads > 0:
        derived = {"num_key_value_heads": heads, "head_dim": width // heads}
        taken = {name: derived[name] for name in _DERIVED.get(block, ())}
    if block == "mistral" and "sliding_window" not in config:
        taken["sliding_window"] = 4096
    fields = taken | {name: value for name, value in config.items() if value is not None}
    if block == "qwen3_moe" and "num_experts" not in fields:
        # transformers 5 saves it by another name than the published files have.
        fields["num_experts"] = fields.pop("num_local_experts", None)
    return fields


def write_llama(sizes: models.LlamaConfig, max_length: int | None, block: str) -> ConfigValues:
    """Returns the config.json. `max_length` is `max_position_embeddings`, in tokens."""
    values = {
        "architectures": [f"{block.title().replace('_', '')}ForCausalLM"],
        "model_type": block,
        **write_fields(sizes, LLAMA_FIELDS[block]),
        "rope_theta": sizes.rope_max_timescale,
        "rope_scaling": None,
        "max_position_embeddings": max_length or 4096,
    }
    if sizes.rope_type == "llama3.1":
        factor = sizes.llama31_rope_factor
        values["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **_LLAMA3_FIXED}
        values["max_position_embeddings"] = max_length or 131_072  # as all published ones have it
    return values


def llama_slices(sizes: models.LlamaConfig, block: str) -> LeafSlices:
    """Returns the slices of the leaves of one layer; names are relative to the layer."""
    D = sizes.base_emb_dim
    if sizes.moe is None:
        mlp = swiglu_weights("mlp", D, sizes.base_mlp_dim)
        return attention_slices(sizes) | with_prefix("mlp", mlp)
    E, F, (module, names) = sizes.moe.num_experts, sizes.moe.expert_dim, _EXPERTS[block]
    return {
        **attention_slices(sizes),
        "moe/router/logits": linear_weight(f"{module}.gate.weight", (D,), (E,)),
        **with_prefix("moe/experts", expert_weights(f"{module}.experts", E, D, F, names)),
    }


def attention_slices(sizes: models.LlamaConfig) -> LeafSlices:
    """Returns the slices of a layer's attention, and of the norms before and behind it."""
    D, H, K, C = sizes.attention
    attention = {
        "query": linear_weight("self_attn.q_proj.weight", (D,), (H, C)),
        "key": linear_weight("self_attn.k_proj.weight", (D,), (K, C)),
        "value": linear_weight("self_attn.v_proj.weight", (D,), (K, C)),
        "out": linear_weight("self_attn.o_proj.weight", (H, C), (D,)),
    }
    if sizes.use_qk_norm and sizes.qk_norm_has_scales:
        attention["query_norm"] = same_tensor("self_attn.q_norm.weight", (C,))
        attention["key_norm"] = same_tensor("self_attn.k_norm.weight", (C,))
    return {
        "attention_norm": same_tensor("input_layernorm.weight", (D,)),
        **with_prefix("attention", attention),
        "mlp_norm": same_tensor("post_attention_layernorm.weight", (D,)),
    }
