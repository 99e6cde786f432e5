"""DeepSeek-V2 and V3 as Hugging Face has them.

There, rotary channels turn in pairs, in queries and in the key that heads share.

D embed, H heads, Q width of compressed queries, R of compressed keys and values, N channels of a
head without position, P with it, C = N + P, V channels of a value head, E experts, F their width.
"""

from collections.abc import Mapping
from typing import Any

from ... import models
from ...models.layers import LatentAttentionSettings
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
from ._tensors import (
    LeafSlices,
    TensorSlice,
    expert_weights,
    head_rows,
    linear_weight,
    same_tensor,
    swiglu_weights,
    with_prefix,
)

_SIZES = {
    "hidden_size": "base_emb_dim",
    "num_hidden_layers": "base_num_decoder_layers",
    "first_k_dense_replace": "first_num_dense_layers",
    "num_attention_heads": "base_num_query_heads",
    "intermediate_size": "base_mlp_dim",
    "moe_intermediate_size": "base_moe_mlp_dim",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "n_shared_experts": "shared_experts",
    "routed_scaling_factor": "routed_scaling_factor",
    "aux_loss_alpha": "load_balance_loss_weight",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "normalization_layer_epsilon",
}
_DEFAULTS = {"rms_norm_eps": 1e-6, "aux_loss_alpha": 0.0, "q_lora_rank": 0}
_FIXED = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0.0, None),
    "tie_word_embeddings": (False,),
    "moe_layer_freq": (1,),
}
# Every head has its own keys, so their number says nothing; nor do those that others give.
_IGNORED = ("ep_size", "head_dim", "num_key_value_heads", "qk_head_dim", "seq_aux")
_V2 = ConfigFields(
    _SIZES,
    _DEFAULTS,
    # transformers takes no notice of `norm_topk_prob`, and the published code does.
    fixed=_FIXED | {"mlp_bias": (False,), "scoring_func": ("softmax",), "norm_topk_prob": (False,)},
    ignored=(*_IGNORED, "n_group", "topk_group", "topk_method"),
)
_V3 = ConfigFields(
    _SIZES
    | {
        "n_group": "n_routing_groups",
        "topk_group": "topk_routing_group",
        "norm_topk_prob": "norm_topk_prob",
    },
    _DEFAULTS | {"norm_topk_prob": True},
    fixed=_FIXED
    | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "rope_interleave": (True,)},
    ignored=(*_IGNORED, "num_nextn_predict_layers"),
)
_V3_ROUTER: ConfigValues = {
    "routed_score_func": "sigmoid",
    "routed_bias": True,
    "group_score_experts": 2,
}
_YARN = YARN | {"mscale": "mscale"}


def read_deepseek(config: Mapping[str, Any]) -> ConfigValues:
    """Returns the config keys of jaxpipe for a config.json."""
    if config["model_type"] == "deepseek_v2":
        values = read_fields(config, _V2) | _v2_groups(
            config.get("topk_method", "greedy"), config.get("n_group"), config.get("topk_group")
        )
    else:
        values = read_fields(config, _V3) | _V3_ROUTER
    rope = read_rope(
        config,
        defaults={"rope_theta": 10_000.0, "beta_fast": 32.0, "beta_slow": 1.0},
        types={"default": (), "yarn": (*_YARN, "mscale_all_dim")},
    )
    return values | _rope_values(rope)


def _v2_groups(method: Any, groups: Any, top_groups: Any) -> ConfigValues:
    if method == "greedy" or (method, groups, top_groups) == ("group_limited_greedy", 1, 1):
        return {}
    if method != "group_limited_greedy" or groups is None or top_groups is None:
        raise ValueError(
            f"`topk_method` is {method!r}, `n_group` {groups!r} and `topk_group` {top_groups!r}: "
            "only 'greedy', or 'group_limited_greedy' with both numbers, is supported"
        )
    return {"n_routing_groups": groups, "topk_routing_group": top_groups, "group_score_experts": 1}


def _rope_values(rope: ConfigValues) -> ConfigValues:
    base = {"rope_max_timescale": float(rope["rope_theta"])}
    if rope["rope_type"] == "default":
        return base
    if rope["mscale"] != rope["mscale_all_dim"]:
        check_no_problems(
            [
                f"`mscale` of rotary positions is {rope['mscale']!r} and `mscale_all_dim` "
                f"{rope['mscale_all_dim']!r}: only equal ones are supported"
            ]
        )
    return base | yarn_values(rope, _YARN)


def write_deepseek(sizes: models.DeepseekConfig, max_length: int | None) -> ConfigValues:
    """Returns the config.json. `max_length` is `max_position_embeddings`, in tokens."""
    is_v3 = sizes.routed_score_func == "sigmoid"
    _check_published(sizes, is_v3)
    name = "DeepseekV3" if is_v3 else "DeepseekV2"
    values = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        **write_fields(sizes, _V3 if is_v3 else _V2),
        "num_key_value_heads": sizes.base_num_query_heads,
        "q_lora_rank": sizes.q_lora_rank or None,
        "rope_theta": sizes.rope_max_timescale,
        "rope_scaling": None,
        "max_position_embeddings": max_length or 4096,
    }
    if is_v3:
        values["num_nextn_predict_layers"] = 0
    else:
        in_groups = sizes.n_routing_groups > 1
        values["topk_method"] = "group_limited_greedy" if in_groups else "greedy"
        values |= {"n_group": sizes.n_routing_groups, "topk_group": sizes.topk_routing_group}
    if sizes.rope_type == "yarn":
        if sizes.mscale == 0:
            raise ValueError("`mscale` is 0, which transformers reads as no `mscale`")
        yarn = {name: getattr(sizes, key) for name, key in _YARN.items()}
        values["rope_scaling"] = {"rope_type": "yarn", "type": "yarn", **yarn}
        values["rope_scaling"]["mscale_all_dim"] = sizes.mscale
        stretched = int(sizes.original_max_position_embeddings * sizes.rope_factor)
        values["max_position_embeddings"] = max_length or stretched
    return values


def _check_published(sizes: models.DeepseekConfig, is_v3: bool) -> None:
    """Checks that the router is that of V2 or of V3."""
    published: ConfigValues = {"routed_bias": is_v3}
    if sizes.n_routing_groups > 1:
        published["group_score_experts"] = 2 if is_v3 else 1
    if not is_v3:
        published["norm_topk_prob"] = False
    problems = [
        f"`{key}` is {getattr(sizes, key)!r}"
        for key, value in published.items()
        if getattr(sizes, key) != value
    ]
    if not sizes.shared_experts:
        problems.append("`shared_experts` is 0")
    if problems:
        version = "V3" if is_v3 else "V2"
        raise ValueError(
            f"{' and '.join(problems)}, and `routed_score_func` {sizes.routed_score_func!r}, as "
            f"DeepSeek-{version} has it, which differs there. Hugging Face has no such model."
        )


def deepseek_dense_slices(sizes: models.DeepseekConfig) -> LeafSlices:
    """Returns the slices of the leaves of a dense layer; names are relative to the layer."""
    return _shared_slices(sizes.attention) | with_prefix(
        "mlp", swiglu_weights("mlp", sizes.base_emb_dim, sizes.base_mlp_dim)
    )


def deepseek_slices(sizes: models.DeepseekConfig) -> LeafSlices:
    """Returns the slices of the leaves of a layer with experts."""
    D, E, F = sizes.base_emb_dim, sizes.num_experts, sizes.base_moe_mlp_dim
    router = {"router/logits": linear_weight("mlp.gate.weight", (D,), (E,))}
    if sizes.routed_bias:
        router["router/bias"] = same_tensor("mlp.gate.e_score_correction_bias", (E,))
    experts = with_prefix("experts", expert_weights("mlp.experts", E, D, F))
    slices = _shared_slices(sizes.attention) | with_prefix("moe", router | experts)
    if sizes.shared_experts:
        shared = swiglu_weights("mlp.shared_experts", D, F * sizes.shared_experts)
        slices |= with_prefix("moe/shared", shared)
    return slices


def _shared_slices(attention: LatentAttentionSettings) -> LeafSlices:
    """Returns the slices that dense layers and layers with experts have in common."""
    D = attention.embed_dim
    return {
        "attention_norm": same_tensor("input_layernorm.weight", (D,)),
        **with_prefix("attention", _attention(attention)),
        "mlp_norm": same_tensor("post_attention_layernorm.weight", (D,)),
    }


def _attention(sizes: LatentAttentionSettings) -> LeafSlices:
    D, H, Q, R = sizes.embed_dim, sizes.num_heads, sizes.q_lora_rank, sizes.kv_lora_rank
    N, P, V = sizes.qk_nope_head_dim, sizes.qk_rope_head_dim, sizes.v_head_dim
    plain, turned = slice(N), slice(N, None)

    def queries(tensor: str, num_ins: int) -> tuple[TensorSlice, ...]:
        dims = (H, N + P, num_ins)
        return (
            head_rows(tensor, dims, plain, leaf_rows=plain),
            head_rows(tensor, dims, turned, leaf_rows=turned, in_pairs=True),
        )

    if Q:
        slices = {
            "query_down": linear_weight("self_attn.q_a_proj.weight", (D,), (Q,)),
            "query_norm": same_tensor("self_attn.q_a_layernorm.weight", (Q,)),
            "query_up": queries("self_attn.q_b_proj.weight", Q),
        }
    else:
        slices = {"query": queries("self_attn.q_proj.weight", D)}
    compressed, up = "self_attn.kv_a_proj_with_mqa.weight", "self_attn.kv_b_proj.weight"
    return {
        **slices,
        "kv_down": (head_rows(compressed, (1, R + P, D), slice(R)),),
        "rope_key": (head_rows(compressed, (1, R + P, D), slice(R, None), in_pairs=True),),
        "kv_norm": same_tensor("self_attn.kv_a_layernorm.weight", (R,)),
        "key_up": (head_rows(up, (H, N + V, R), plain),),
        "value_up": (head_rows(up, (H, N + V, R), slice(N, None)),),
        "out": linear_weight("self_attn.o_proj.weight", (H, V), (D,)),
    }
