"""Gemma 3's language models as Hugging Face has them, in `model_type` gemma3_text.

Scales of norms are stored as what they add to 1 on both sides. D embed, C channels of a head.
"""

from collections.abc import Mapping
from typing import Any

from ... import models
from ..._input import short_repr
from ._fields import ROPE, ConfigFields, ConfigValues, read_fields, read_rope, write_fields
from ._llama import LLAMA_SIZES, llama_slices
from ._tensors import LeafSlices, same_tensor

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_FIELDS = ConfigFields(
    LLAMA_SIZES
    | {
        "query_pre_attn_scalar": "query_pre_attn_scalar",
        "sliding_window": "sliding_window_size",
    },
    {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "attention_dropout": (0.0, None),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    },
    ignored=("cache_implementation", "_sliding_window_pattern"),
)
_OWN_FIELDS = ("layer_types", "sliding_window_pattern", "rope_local_base_freq", *ROPE)
_ROPE_TYPES = {"default": (), "linear": ("factor",)}


def read_gemma(config: Mapping[str, Any]) -> ConfigValues:
    """Returns the config keys of jaxpipe for a config.json."""
    others = {name: value for name, value in config.items() if name not in _OWN_FIELDS}
    values = read_fields(others, _FIELDS)
    values["sliding_window_pattern"] = _read_pattern(config, values["base_num_decoder_layers"])
    local, of_global = _rope_fields(config)
    local = read_rope(local, defaults={"rope_theta": 10_000.0}, types={"default": ()})
    of_global = read_rope(of_global, defaults={"rope_theta": 1_000_000.0}, types=_ROPE_TYPES)
    return values | {
        "local_rope_max_timescale": float(local["rope_theta"]),
        "rope_max_timescale": float(of_global["rope_theta"]),
        "rope_linear_scaling_factor": float(of_global.get("factor", 1.0)),
    }


def _rope_fields(config: Mapping[str, Any]) -> tuple[ConfigValues, ConfigValues]:
    """Returns the fields of rotary positions of local layers and of global ones."""
    by_kind = config.get("rope_parameters")
    if not by_kind:  # older files have fields for each
        local = {"rope_theta": config.get("rope_local_base_freq")}
        return local, {name: config.get(name) for name in ROPE}
    if not isinstance(by_kind, Mapping) or not {*by_kind} <= {_LOCAL, _GLOBAL}:
        raise ValueError(
            f"`rope_parameters` is {short_repr(by_kind)}: only an object with {_LOCAL} and "
            f"{_GLOBAL} is supported"
        )
    return {"rope_parameters": by_kind.get(_LOCAL)}, {"rope_parameters": by_kind.get(_GLOBAL)}


def _read_pattern(config: Mapping[str, Any], num_layers: Any) -> Any:
    """Returns n, if the n-th, 2 n-th, ... layer is global and all others are local."""
    pattern, types = config.get("sliding_window_pattern", 6), config.get("layer_types")
    if types is None:
        return pattern
    if isinstance(types, list) and _GLOBAL in types:
        pattern = types.index(_GLOBAL) + 1
    is_number = type(pattern) is int and pattern > 0 and type(num_layers) is int
    layers = range(1, num_layers + 1) if is_number else ()
    if types != [_LOCAL if i % pattern else _GLOBAL for i in layers]:
        raise ValueError(
            f"`layer_types` is {short_repr(types)}: only {_GLOBAL} in every n-th of {num_layers} "
            f"layers and {_LOCAL} in all others is supported"
        )
    return pattern


def write_gemma(sizes: models.GemmaConfig, max_length: int | None) -> ConfigValues:
    """Returns the config.json. `max_length` is `max_position_embeddings`, in tokens."""
    factor = sizes.rope_linear_scaling_factor
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **write_fields(sizes, _FIELDS),
        "layer_types": [(_LOCAL, _GLOBAL)[kind] for kind in sizes.layer_kinds],
        "sliding_window_pattern": sizes.sliding_window_pattern,
        "rope_theta": sizes.rope_max_timescale,
        "rope_local_base_freq": sizes.local_rope_max_timescale,
        "rope_scaling": None if factor == 1.0 else {"rope_type": "linear", "factor": factor},
        "max_position_embeddings": max_length or (4096 if factor == 1.0 else 131_072),
    }


def gemma_slices(sizes: models.GemmaConfig) -> LeafSlices:
    """Returns the slices of the leaves of one layer; names are relative to the layer."""
    D = (sizes.base_emb_dim,)
    return llama_slices(sizes, "gemma3") | {
        "post_attention_norm": same_tensor("post_attention_layernorm.weight", D),
        "mlp_norm": same_tensor("pre_feedforward_layernorm.weight", D),
        "post_mlp_norm": same_tensor("post_feedforward_layernorm.weight", D),
    }
