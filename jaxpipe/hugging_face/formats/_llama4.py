"""Llama 4's language models as Hugging Face has them, in `model_type` llama4_text.

There, rotary channels turn in pairs, and one tensor has the first two matrices of all experts side
by side. D embed, H query heads, K key and value heads, C channels of a head, E experts, F their
width.
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
from ._llama import ATTENTION_SIZES, attention_slices
from ._tensors import (
    LeafSlices,
    TensorSlice,
    head_rows,
    linear_weight,
    same_tensor,
    swiglu_weights,
    with_prefix,
)

_FIELDS = ConfigFields(
    ATTENTION_SIZES
    | {
        "intermediate_size": "base_moe_mlp_dim",
        "intermediate_size_mlp": "base_mlp_dim",
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_tok",
        "interleave_moe_layer_step": "interleave_moe_layer_step",
        "attention_chunk_size": "chunk_attn_window_size",
        "no_rope_layer_interval": "nope_layer_interval",
        "use_qk_norm": "use_qk_norm",
        "attn_temperature_tuning": "temperature_tuning",
    },
    {
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
    },
    {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "attention_dropout": (0.0, None),
        "floor_scale": (8192,),
        "attn_scale": (0.1,),
        "router_jitter_noise": (0.0,),
        "for_llm_compression": (False,),
    },
    ignored=("router_aux_loss_coef",),
)
_LISTS = ("layer_types", "moe_layers", "no_rope_layers")


def read_llama4(config: Mapping[str, Any]) -> ConfigValues:
    """Returns the config keys of jaxpipe for a config.json."""
    others = {name: value for name, value in config.items() if name not in _LISTS}
    values = read_fields(others, _FIELDS)
    if type(values["temperature_tuning"]) is int:  # 4 in published files
        values["temperature_tuning"] = values["temperature_tuning"] > 0
    if values["interleave_moe_layer_step"] == 1:
        values["base_mlp_dim"] = values["base_moe_mlp_dim"]  # no layer has an MLP
    rope = read_rope(config, defaults={"rope_theta": 500_000.0}, types={"default": ()})
    _check_lists(config, values)
    return values | {"rope_max_timescale": float(rope["rope_theta"])}


def _check_lists(config: Mapping[str, Any], values: ConfigValues) -> None:
    """Checks that lists with an entry per layer say what the steps of layers say."""
    names = ("base_num_decoder_layers", "interleave_moe_layer_step", "nope_layer_interval")
    numbers = [values[name] for name in names]
    if not all(type(number) is int and number > 0 for number in numbers):
        return  # `_parse_sizes` refuses such values, with their types
    count, step, interval = numbers
    has_rope = [int((i + 1) % interval != 0) for i in range(count)]
    expected = {
        "layer_types": [("full_attention", "chunked_attention")[rope] for rope in has_rope],
        "moe_layers": list(range(step - 1, count, step)),
        "no_rope_layers": has_rope,
    }
    check_no_problems(
        [
            f"`{name}` is {short_repr(config[name])}: only what `interleave_moe_layer_step` and "
            "`no_rope_layer_interval` say is supported"
            for name, entries in expected.items()
            if config.get(name) and config[name] != entries
        ]
    )


def write_llama4(sizes: models.Llama4Config, max_length: int | None) -> ConfigValues:
    """Returns the config.json. `max_length` is `max_position_embeddings`, in tokens."""
    fields = write_fields(sizes, _FIELDS)
    del fields["for_llm_compression"]  # only files before transformers 5 have it
    return {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        **fields,
        "rope_theta": sizes.rope_max_timescale,
        "rope_scaling": None,
        "max_position_embeddings": max_length or 131_072,
    }


def llama4_slices(sizes: models.Llama4Config, index: int = 0) -> LeafSlices:
    """Returns the slices of the leaves of one layer of a block; names are relative to it."""
    D, H, K, C = sizes.attention
    slices = attention_slices(sizes) | {
        "attention/query": (head_rows("self_attn.q_proj.weight", (H, C, D), in_pairs=True),),
        "attention/key": (head_rows("self_attn.k_proj.weight", (K, C, D), in_pairs=True),),
    }
    if index < sizes.layers_per_block - 1:
        mlp = swiglu_weights("feed_forward", D, sizes.base_mlp_dim)
        return slices | with_prefix("mlp", mlp)
    E, F = sizes.num_experts, sizes.base_moe_mlp_dim
    columns, shape = "feed_forward.experts.gate_up_proj", (E, D, 2 * F)
    experts = {
        "gate": (TensorSlice(columns, shape, lambda x: x, lambda x: x[..., :F]),),
        "up": (TensorSlice(columns, shape, lambda x: x, lambda x: x[..., F:]),),
        "down": same_tensor("feed_forward.experts.down_proj", (E, F, D)),
    }
    return {
        **slices,
        "moe/router/logits": linear_weight("feed_forward.router.weight", (D,), (E,)),
        **with_prefix("moe/experts", experts),
        **with_prefix("moe/shared", swiglu_weights("feed_forward.shared_expert", D, F)),
    }
