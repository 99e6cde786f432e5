"""Counts the floating-point operations of a training step per token, as papers do.

Every weight that a token is multiplied by counts 6 (2 forward, 4 backward). Attention counts the
causal half of the T x T scores and of the sums of values. Embedding look-ups and rematerialization
are not counted.

D embed, F width of an MLP, H query heads, K key and value heads, C channels of a head, V vocab.
"""

from ._deepseek_config import DeepseekConfig
from ._llama import LlamaConfig


def matmul_flops_per_token(config: LlamaConfig | DeepseekConfig, length: int) -> float:
    """Returns the floating-point operations of forward and backward per token.

    Args:
        config: The sizes of the model.
        length: The length of the sequences, in tokens.

    Returns:
        Floating-point operations per token.

    Example:
        >>> from jaxpipe.models import PRESETS
        >>> sizes = LlamaConfig(**PRESETS["llama-tiny"])
        >>> matmul_flops_per_token(sizes, length=128)
        2875392.0
    """
    layers = (
        _llama(config, length) if isinstance(config, LlamaConfig) else _deepseek(config, length)
    )
    return 6.0 * (layers + config.base_emb_dim * config.vocab_size)


def _llama(config: LlamaConfig, length: int) -> float:
    """Returns the multiply-adds of a token in all layers, forward only."""
    D, F, C = config.base_emb_dim, config.base_mlp_dim, config.head_dim
    H, K = config.base_num_query_heads, config.base_num_kv_heads
    layer = 2 * D * H * C + 2 * D * K * C + 3 * D * F
    scores = 2 * H * C * length / 2
    return config.base_num_decoder_layers * (layer + scores)


def _deepseek(config: DeepseekConfig, length: int) -> float:
    D, dense_layers = config.base_emb_dim, config.first_num_dense_layers
    experts = config.num_experts_per_tok + config.shared_experts
    moe = D * config.num_experts + experts * 3 * D * config.base_moe_mlp_dim
    return (
        config.base_num_decoder_layers * _latent_attention(config, length)
        + dense_layers * 3 * D * config.base_mlp_dim
        + (config.base_num_decoder_layers - dense_layers) * moe
    )


def _latent_attention(config: DeepseekConfig, length: int) -> float:
    D, H, rank = config.base_emb_dim, config.base_num_query_heads, config.kv_lora_rank
    C = config.qk_nope_head_dim + config.qk_rope_head_dim
    low = config.q_lora_rank
    queries = D * low + low * H * C if low else D * H * C
    latents = D * (rank + config.qk_rope_head_dim)
    heads = rank * H * (config.qk_nope_head_dim + config.v_head_dim)
    scores = H * (C + config.v_head_dim) * length / 2
    return queries + latents + heads + H * config.v_head_dim * D + scores
