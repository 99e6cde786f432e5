"""Llama 2 and 3 as Hugging Face has them.

Both sides turn the first half of a head's channels against the second, so rotary positions need no
other order. D embed, H query heads, K key and value heads, C channels of a head.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ... import models
from ._fields import (
    ConfigFields,
    ConfigValues,
    check_no_problems,
    read_fields,
    read_rope,
    write_fields,
)
from ._tensors import LeafSlices, linear_weight, same_tensor, swiglu_weights, with_prefix

_FIELDS = ConfigFields(
    sizes={
        "hidden_size": "base_emb_dim",
        "num_hidden_layers": "base_num_decoder_layers",
        "num_attention_heads": "base_num_query_heads",
        "num_key_value_heads": "base_num_kv_heads",
        "intermediate_size": "base_mlp_dim",
        "head_dim": "head_dim",
        "vocab_size": "vocab_size",
        "rms_norm_eps": "normalization_layer_epsilon",
        "tie_word_embeddings": "logits_via_embedding",
    },
    defaults={"rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    fixed={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "attention_dropout": (0.0, None),
    },
)
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_LLAMA3_FIXED = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read_llama(config: Mapping[str, Any]) -> ConfigValues:
    """Returns the config keys of jaxpipe for a config.json."""
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    non_null = {name: value for name, value in config.items() if value is not None}
    if isinstance(heads, int) and isinstance(width, int) and heads > 0:
        non_null = {"num_key_value_heads": heads, "head_dim": width // heads} | non_null
    values = read_fields(non_null, _FIELDS)
    rope = read_rope(
        config,
        defaults={"rope_theta": 10_000.0},
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


def write_llama(sizes: models.LlamaConfig, max_length: int | None) -> ConfigValues:
    """Returns the config.json. `max_length` is `max_position_embeddings`, in tokens."""
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **write_fields(dataclasses.asdict(sizes), _FIELDS),
        "rope_theta": sizes.rope_max_timescale,
        "rope_scaling": None,
        "max_position_embeddings": max_length or 4096,
    }
    if sizes.rope_type == "llama3.1":
        factor = sizes.llama31_rope_factor
        values["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **_LLAMA3_FIXED}
        values["max_position_embeddings"] = max_length or 131_072  # as all published ones have it
    return values


def llama_slices(sizes: models.LlamaConfig) -> LeafSlices:
    """Returns the slices of the leaves of one layer; names are relative to the layer."""
    D, H, K, C = sizes.attention
    attention = {
        "query": linear_weight("self_attn.q_proj.weight", (D,), (H, C)),
        "key": linear_weight("self_attn.k_proj.weight", (D,), (K, C)),
        "value": linear_weight("self_attn.v_proj.weight", (D,), (K, C)),
        "out": linear_weight("self_attn.o_proj.weight", (H, C), (D,)),
    }
    return {
        "attention_norm": same_tensor("input_layernorm.weight", (D,)),
        **with_prefix("attention", attention),
        "mlp_norm": same_tensor("post_attention_layernorm.weight", (D,)),
        **with_prefix("mlp", swiglu_weights("mlp", D, sizes.base_mlp_dim)),
    }
