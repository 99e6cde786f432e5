"""The sizes of the models that tests run, once: a test says what differs."""

from collections.abc import Callable
from typing import Any

from jaxpipe import models, sharding
from jaxpipe.autodiff.staged_model import run_layers, run_sliced_layers
from jaxpipe.kernels import dot_product_attention
from jaxpipe.models import (
    DeepseekConfig,
    GemmaConfig,
    GptOssConfig,
    Llama4Config,
    LlamaConfig,
    MixtureConfig,
)

_LLAMA: dict[str, Any] = {
    "base_emb_dim": 16,
    "base_num_decoder_layers": 2,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "base_mlp_dim": 32,
    "head_dim": 8,
    "vocab_size": 32,
}
_GEMMA: dict[str, Any] = _LLAMA | {
    "use_qk_norm": True,
    "query_pre_attn_scalar": 5,
    "sliding_window_size": 3,
    "sliding_window_pattern": 3,
    "local_rope_max_timescale": 100.0,
    "rope_linear_scaling_factor": 2.0,
}
_MIXTURE: dict[str, Any] = _LLAMA | {
    "base_mlp_dim": 8,
    "base_moe_mlp_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "load_balance_loss_weight": 0.1,
}
_GPT_OSS: dict[str, Any] = _MIXTURE | {
    "sliding_window_size": 3,
    "rope_max_timescale": 100.0,
    "rope_factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 2.0,
}
_LLAMA4: dict[str, Any] = _MIXTURE | {
    "base_num_decoder_layers": 4,
    "base_mlp_dim": 24,
    "interleave_moe_layer_step": 2,
    "chunk_attn_window_size": 3,
    "norm_topk_prob": False,
    "use_qk_norm": True,
    "temperature_tuning": True,
}
_DEEPSEEK_V2: dict[str, Any] = {
    "base_emb_dim": 16,
    "base_num_decoder_layers": 4,
    "first_num_dense_layers": 1,
    "base_num_query_heads": 2,
    "base_mlp_dim": 32,
    "base_moe_mlp_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_experts": 1,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "vocab_size": 32,
}
_DEEPSEEK_V3: dict[str, Any] = _DEEPSEEK_V2 | {
    "q_lora_rank": 8,
    "routed_score_func": "sigmoid",
    "routed_bias": True,
    "norm_topk_prob": True,
    "load_balance_loss_weight": 0.1,
}


def stack(layer: Callable, scan: bool = True) -> Callable:
    """Returns the stage that runs layers, on whole sequences or on a slice of each."""

    def stage(weights: Any, x: Any, batch_inputs: Any, keys: Any, *past: Any) -> Any:
        run = run_sliced_layers if past else run_layers
        return run(layer, weights, x, batch_inputs, keys, *past, scan=scan)

    return stage


def small_llama(**changes: Any) -> LlamaConfig:
    """Returns a llama of two layers of width 16, two query heads for each key head."""
    return LlamaConfig(**_LLAMA | changes)


def small_gemma(**changes: Any) -> GemmaConfig:
    """Returns a Gemma 3: as `small_llama`, with two local layers and a global one in turn."""
    return GemmaConfig(**_GEMMA | changes)


def small_gpt_oss(**changes: Any) -> GptOssConfig:
    """Returns a gpt-oss: as `small_mixture`, with a local layer and a global one in turn."""
    return GptOssConfig(**_GPT_OSS | changes)


def small_llama4(**changes: Any) -> Llama4Config:
    """Returns a Llama 4: two blocks of a layer with an MLP and one with experts."""
    return Llama4Config(**_LLAMA4 | changes)


def small_mixture(**changes: Any) -> MixtureConfig:
    """Returns a Mixtral: as `small_llama`, with four experts in every layer."""
    return MixtureConfig(**_MIXTURE | changes)


def small_llama_loss(**changes: Any) -> Any:
    """Returns the loss of a small llama, of its weights at the boundary, the stream and a batch."""
    attention = dot_product_attention
    options = {"attention": attention, "constrain": sharding.no_constraint} | changes
    return models.llama(small_llama(), **options)[-1]


def small_deepseek_v2(**changes: Any) -> DeepseekConfig:
    """Returns a DeepSeek-V2 of a dense layer and three with four experts."""
    return DeepseekConfig(**_DEEPSEEK_V2 | changes)


def small_deepseek(**changes: Any) -> DeepseekConfig:
    """Returns a DeepSeek-V3: as `small_deepseek_v2`, with V3's latent queries and router."""
    return DeepseekConfig(**_DEEPSEEK_V3 | changes)
