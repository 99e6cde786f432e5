"""gpt-oss as Hugging Face has it, with weights of 16 or 32 bits.

There, one tensor has the columns of the first two matrices of all experts in turn: gate, up, gate,
up. D embed, H query heads, K key and value heads, C channels of a head, E experts, F their width.
"""

from collections.abc import Mapping
from typing import Any

from ... import models
from ..._input import short_repr
from ._fields import (
    YARN,
    ConfigFields,
    ConfigValues,
    check_no_problems,
    read_fields,
    read_rope,
    write_fields,
    yarn_values,
)
from ._llama import ATTENTION_SIZES, attention_slices
from ._tensors import LeafSlices, TensorSlice, linear_weight, same_tensor, with_prefix

_FIELDS = ConfigFields(
    ATTENTION_SIZES
    | {
        "intermediate_size": "base_moe_mlp_dim",
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_tok",
        "sliding_window": "sliding_window_size",
    },
    {
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "tie_word_embeddings": False,
    },
    {
        "hidden_act": ("silu",),
        "attention_bias": (True,),
        "attention_dropout": (0.0, None),
        "swiglu_alpha": (1.702,),
        "swiglu_limit": (7.0,),
    },
    # The first two repeat other fields in the published files.
    ignored=("experts_per_token", "initial_context_length", "router_aux_loss_coef"),
)
_TYPES = ("sliding_attention", "full_attention")
_ROPE_DEFAULT = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_gpt_oss(config: Mapping[str, Any]) -> ConfigValues:
    """Returns the config keys of jaxpipe for a config.json."""
    others = {name: value for name, value in config.items() if name != "layer_types"}
    values = read_fields(others, _FIELDS)
    count, types = values["base_num_decoder_layers"], config.get("layer_types")
    is_in_turn = isinstance(types, list) and types == [_TYPES[i % 2] for i in range(len(types))]
    if types is not None and not is_in_turn:
        check_no_problems(
            [
                f"`layer_types` is {short_repr(types)}: only {_TYPES[0]} and {_TYPES[1]} in turn "
                "are supported"
            ]
        )
    if types is not None and len(types) != count:
        check_no_problems([f"`layer_types` has {len(types)} entries for {count} layers"])
    rope = _read_yarn(config)
    base = {"base_mlp_dim": values["base_moe_mlp_dim"]}
    return values | base | yarn_values(rope) | {"rope_max_timescale": float(rope["rope_theta"])}


def _read_yarn(config: Mapping[str, Any]) -> ConfigValues:
    """Returns the fields of rotary positions, which do not begin and end at whole pairs."""
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(name) or _ROPE_DEFAULT
    if isinstance(rope, Mapping):
        rope = dict(rope)
        truncate = rope.pop("truncate", True)
        kind = rope.get("rope_type") or rope.get("type")
        if kind == "yarn" and truncate is not False:
            check_no_problems([f"`{name}.truncate` is {truncate!r}: only False is supported"])
    return read_rope(
        {"rope_theta": config.get("rope_theta"), name: rope},
        defaults={"rope_theta": 150_000.0, "beta_fast": 32.0, "beta_slow": 1.0},
        types={"yarn": tuple(YARN)},
    )


def write_gpt_oss(sizes: models.GptOssConfig, max_length: int | None) -> ConfigValues:
    """Returns the config.json. `max_length` is `max_position_embeddings`, in tokens."""
    trained = sizes.original_max_position_embeddings
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **write_fields(sizes, _FIELDS),
        "layer_types": [_TYPES[kind] for kind in sizes.layer_kinds],
        "rope_theta": sizes.rope_max_timescale,
        "rope_scaling": {
            "rope_type": "yarn",
            "truncate": False,
            **{name: getattr(sizes, key) for name, key in YARN.items()},
        },
        "max_position_embeddings": max_length or int(trained * sizes.rope_factor),
    }


def gpt_oss_slices(sizes: models.GptOssConfig) -> LeafSlices:
    """Returns the slices of the leaves of one layer; names are relative to the layer."""
    D, H, K, C = sizes.attention
    E, F = sizes.num_experts, sizes.base_moe_mlp_dim
    attention = {
        "query_bias": _heads("self_attn.q_proj.bias", H, C),
        "key_bias": _heads("self_attn.k_proj.bias", K, C),
        "value_bias": _heads("self_attn.v_proj.bias", K, C),
        "out_bias": same_tensor("self_attn.o_proj.bias", (D,)),
        "sinks": same_tensor("self_attn.sinks", (H,)),
    }
    router = {
        "logits": linear_weight("mlp.router.weight", (D,), (E,)),
        "logits_bias": same_tensor("mlp.router.bias", (E,)),
    }
    columns, biases = "mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias"
    experts = {
        "gate": _every_second(columns, (E, D, 2 * F), 0),
        "up": _every_second(columns, (E, D, 2 * F), 1),
        "down": same_tensor("mlp.experts.down_proj", (E, F, D)),
        "gate_bias": _every_second(biases, (E, 2 * F), 0),
        "up_bias": _every_second(biases, (E, 2 * F), 1),
        "down_bias": same_tensor("mlp.experts.down_proj_bias", (E, D)),
    }
    return {
        **attention_slices(sizes),
        **with_prefix("attention", attention),
        **with_prefix("moe/router", router),
        **with_prefix("moe/experts", experts),
    }


def _heads(tensor: str, num_heads: int, channels: int) -> tuple[TensorSlice, ...]:
    """Returns the slice of a bias [heads, channels], which torch stores as one dim."""
    shape = num_heads, channels
    return (TensorSlice(tensor, (num_heads * channels,), lambda x: x, lambda x: x.reshape(shape)),)


def _every_second(tensor: str, shape: tuple[int, ...], first: int) -> tuple[TensorSlice, ...]:
    return (TensorSlice(tensor, shape, lambda x: x, lambda x: x[..., first::2]),)
