"""Sizes of published models, by name.

The keys are those of the configuration: `decoder_block`, the model family (llama if it is missing),
and the fields of its dataclass: `LlamaConfig`, `GemmaConfig`, `MixtureConfig`, `GptOssConfig`,
`Llama4Config` or `DeepseekConfig`.
"""

from typing import Any

_TINY: dict[str, Any] = {
    "base_emb_dim": 64,
    "base_num_decoder_layers": 8,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "base_mlp_dim": 192,
    "head_dim": 16,
    "vocab_size": 320,
    "rope_max_timescale": 10_000.0,
    "rope_type": "default",
    "llama31_rope_factor": 8.0,
    "normalization_layer_epsilon": 1e-5,
    "logits_via_embedding": True,
    "use_qk_norm": False,
}
_TINY_EXPERTS: dict[str, Any] = {
    "base_mlp_dim": 64,
    "base_moe_mlp_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "load_balance_loss_weight": 1e-3,
}
_LLAMA: dict[str, Any] = {
    "base_num_kv_heads": 8,
    "head_dim": 128,
    "rope_max_timescale": 10_000.0,
    "rope_type": "default",
    "llama31_rope_factor": 8.0,
    "normalization_layer_epsilon": 1e-5,
    "logits_via_embedding": False,
    "use_qk_norm": False,
}
_LLAMA3 = _LLAMA | {"vocab_size": 128256, "rope_max_timescale": 500_000.0}
_LLAMA31 = _LLAMA3 | {"rope_type": "llama3.1"}
_MISTRAL = _LLAMA | {
    "base_emb_dim": 4096,
    "base_num_decoder_layers": 32,
    "base_num_query_heads": 32,
    "base_mlp_dim": 14336,
    "rope_max_timescale": 1_000_000.0,
}
_QWEN3 = _LLAMA | {
    "vocab_size": 151936,
    "rope_max_timescale": 1_000_000.0,
    "normalization_layer_epsilon": 1e-6,
    "use_qk_norm": True,
}
_GEMMA3 = _LLAMA | {
    "decoder_block": "gemma3",
    "head_dim": 256,
    "rope_max_timescale": 1_000_000.0,
    "normalization_layer_epsilon": 1e-6,
    "logits_via_embedding": True,
    "use_qk_norm": True,
    "query_pre_attn_scalar": 256,
    "sliding_window_pattern": 6,
    "local_rope_max_timescale": 10_000.0,
}
_QWEN3_EXPERTS = _QWEN3 | {
    "decoder_block": "qwen3_moe",
    "base_num_kv_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "load_balance_loss_weight": 1e-3,
}
_GPT_OSS = _LLAMA | {
    "decoder_block": "gpt_oss",
    "base_emb_dim": 2880,
    "base_num_query_heads": 64,
    "base_mlp_dim": 2880,
    "base_moe_mlp_dim": 2880,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "load_balance_loss_weight": 1e-3,
    "vocab_size": 201088,
    "sliding_window_size": 128,
    "rope_max_timescale": 150_000.0,
    "rope_type": "yarn",
    "rope_factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_DEEPSEEK: dict[str, Any] = {
    "decoder_block": "deepseek",
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_max_timescale": 10_000.0,
    "rope_type": "yarn",
    "rope_factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "normalization_layer_epsilon": 1e-6,
}

PRESETS: dict[str, dict[str, Any]] = {
    "llama-tiny": _TINY,
    "llama2-7b": _LLAMA
    | {
        "base_emb_dim": 4096,
        "base_num_decoder_layers": 32,
        "base_num_query_heads": 32,
        "base_num_kv_heads": 32,
        "base_mlp_dim": 11008,
        "vocab_size": 32000,
    },
    "llama3-8b": _LLAMA3
    | {
        "base_emb_dim": 4096,
        "base_num_decoder_layers": 32,
        "base_num_query_heads": 32,
        "base_mlp_dim": 14336,
    },
    "llama3.1-70b": _LLAMA31
    | {
        "base_emb_dim": 8192,
        "base_num_decoder_layers": 80,
        "base_num_query_heads": 64,
        "base_mlp_dim": 28672,
    },
    "llama3.1-405b": _LLAMA31
    | {
        "base_emb_dim": 16384,
        "base_num_decoder_layers": 126,
        "base_num_query_heads": 128,
        "base_mlp_dim": 53248,
    },
    "llama3.2-1b": _LLAMA31
    | {
        "base_emb_dim": 2048,
        "base_num_decoder_layers": 16,
        "base_num_query_heads": 32,
        "base_mlp_dim": 8192,
        "head_dim": 64,
        "llama31_rope_factor": 32.0,
        "logits_via_embedding": True,
    },
    "mistral-tiny": _TINY | {"decoder_block": "mistral"},
    # Version 0.3. The first version has a sliding window.
    "mistral-7b": _MISTRAL | {"decoder_block": "mistral", "vocab_size": 32768},
    "qwen3-tiny": _TINY | {"decoder_block": "qwen3", "use_qk_norm": True},
    "qwen3-0.6b": _QWEN3
    | {
        "decoder_block": "qwen3",
        "base_emb_dim": 1024,
        "base_num_decoder_layers": 28,
        "base_num_query_heads": 16,
        "base_mlp_dim": 3072,
        "logits_via_embedding": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "decoder_block": "qwen3",
        "base_emb_dim": 4096,
        "base_num_decoder_layers": 36,
        "base_num_query_heads": 32,
        "base_mlp_dim": 12288,
    },
    "gemma3-tiny": _TINY
    | {
        "decoder_block": "gemma3",
        "use_qk_norm": True,
        "query_pre_attn_scalar": 16,
        "sliding_window_size": 16,
        "sliding_window_pattern": 6,
        "local_rope_max_timescale": 10_000.0,
        "rope_linear_scaling_factor": 8.0,
    },
    "gemma3-1b": _GEMMA3
    | {
        "base_emb_dim": 1152,
        "base_num_decoder_layers": 26,
        "base_num_query_heads": 4,
        "base_num_kv_heads": 1,
        "base_mlp_dim": 6912,
        "vocab_size": 262144,
        "sliding_window_size": 512,
        "rope_linear_scaling_factor": 1.0,
    },
    # Without its vision tower.
    "gemma3-4b": _GEMMA3
    | {
        "base_emb_dim": 2560,
        "base_num_decoder_layers": 34,
        "base_num_query_heads": 8,
        "base_num_kv_heads": 4,
        "base_mlp_dim": 10240,
        "vocab_size": 262208,
        "sliding_window_size": 1024,
        "rope_linear_scaling_factor": 8.0,
    },
    "mixtral-tiny": _TINY | _TINY_EXPERTS | {"decoder_block": "mixtral"},
    "mixtral-8x7b": _MISTRAL
    | {
        "decoder_block": "mixtral",
        "base_moe_mlp_dim": 14336,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "load_balance_loss_weight": 1e-3,
        "vocab_size": 32000,
    },
    "qwen3-moe-tiny": _TINY | _TINY_EXPERTS | {"decoder_block": "qwen3_moe", "use_qk_norm": True},
    "qwen3-30b-a3b": _QWEN3_EXPERTS
    | {
        "base_emb_dim": 2048,
        "base_num_decoder_layers": 48,
        "base_num_query_heads": 32,
        "base_mlp_dim": 768,
        "base_moe_mlp_dim": 768,
    },
    "qwen3-235b-a22b": _QWEN3_EXPERTS
    | {
        "base_emb_dim": 4096,
        "base_num_decoder_layers": 94,
        "base_num_query_heads": 64,
        "base_mlp_dim": 1536,
        "base_moe_mlp_dim": 1536,
    },
    "gpt-oss-tiny": _TINY
    | _TINY_EXPERTS
    | {
        "decoder_block": "gpt_oss",
        "logits_via_embedding": False,
        "sliding_window_size": 16,
        "rope_type": "yarn",
        "rope_factor": 8.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    "gpt-oss-20b": _GPT_OSS | {"base_num_decoder_layers": 24, "num_experts": 32},
    "gpt-oss-120b": _GPT_OSS | {"base_num_decoder_layers": 36, "num_experts": 128},
    "llama4-tiny": _TINY
    | _TINY_EXPERTS
    | {
        "decoder_block": "llama4",
        "base_mlp_dim": 128,
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
        "interleave_moe_layer_step": 2,
        "chunk_attn_window_size": 32,
        "nope_layer_interval": 4,
        "temperature_tuning": True,
        "logits_via_embedding": False,
    },
    # 128 experts in every second layer. Without its vision tower.
    "llama4-maverick": _LLAMA3
    | {
        "decoder_block": "llama4",
        "base_emb_dim": 5120,
        "base_num_decoder_layers": 48,
        "base_num_query_heads": 40,
        "base_mlp_dim": 16384,
        "base_moe_mlp_dim": 8192,
        "num_experts": 128,
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
        "load_balance_loss_weight": 1e-3,
        "vocab_size": 202048,
        "interleave_moe_layer_step": 2,
        "chunk_attn_window_size": 8192,
        "nope_layer_interval": 4,
        "temperature_tuning": True,
    },
    "deepseek-tiny": {
        "decoder_block": "deepseek",
        "base_emb_dim": 64,
        "base_num_decoder_layers": 9,
        "first_num_dense_layers": 1,
        "base_num_query_heads": 4,
        "base_mlp_dim": 192,
        "base_moe_mlp_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "shared_experts": 1,
        "routed_score_func": "sigmoid",
        "routed_bias": True,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "n_routing_groups": 1,
        "topk_routing_group": 1,
        "load_balance_loss_weight": 1e-3,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "vocab_size": 320,
        "rope_max_timescale": 10_000.0,
        "rope_type": "default",
        "normalization_layer_epsilon": 1e-6,
    },
    "deepseek2-16b": _DEEPSEEK
    | {
        "base_emb_dim": 2048,
        "base_num_decoder_layers": 27,
        "first_num_dense_layers": 1,
        "base_num_query_heads": 16,
        "base_mlp_dim": 10944,
        "base_moe_mlp_dim": 1408,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "shared_experts": 2,
        "routed_score_func": "softmax",
        "routed_bias": False,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
        "n_routing_groups": 1,
        "topk_routing_group": 1,
        "load_balance_loss_weight": 1e-3,
        "q_lora_rank": 0,
        "vocab_size": 102400,
        "mscale": 0.707,
    },
    "deepseek3-671b": _DEEPSEEK
    | {
        "base_emb_dim": 7168,
        "base_num_decoder_layers": 61,
        "first_num_dense_layers": 3,
        "base_num_query_heads": 128,
        "base_mlp_dim": 18432,
        "base_moe_mlp_dim": 2048,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "shared_experts": 1,
        "routed_score_func": "sigmoid",
        "routed_bias": True,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_routing_groups": 8,
        "topk_routing_group": 4,
        "load_balance_loss_weight": 1e-4,
        "q_lora_rank": 1536,
        "vocab_size": 129280,
        "mscale": 1.0,
    },
}
