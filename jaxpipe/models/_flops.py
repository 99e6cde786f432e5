"""Counts the floating-point operations of a training step per token, as papers do.

Every weight that a token is multiplied by counts 6 (2 forward, 4 backward). Attention counts the
causal half of the T x T scores and of the sums of values, or what a window leaves of it. Chunks of
Llama 4 leave all of it, as kernels compute it. Embedding look-ups and rematerialization are not
counted.

D embed, F width of an MLP, H query heads, K key and value heads, C channels of a head, V vocab.
"""

from ._deepseek import DeepseekConfig
from ._llama import AttentionSizes, LlamaConfig
from .layers._latent_attention import LatentAttentionSettings
from .layers._moe import MoeSettings


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
    D, num_blocks = config.base_emb_dim, config.num_blocks
    num_layers = config.base_num_decoder_layers
    # All layers of a block but the last are of kind 0.
    kinds = (config.layer_kinds or (0,) * num_blocks) + (0,) * (num_layers - num_blocks)
    mean_positions = sum(_positions(config, kind, length) for kind in kinds) / num_layers
    num_dense = num_layers if config.moe is None else num_layers - config.num_pipeline_layers
    if isinstance(config, DeepseekConfig):
        attention = _latent_attention(config.attention, mean_positions)
    else:
        attention = _grouped_attention(config.attention, mean_positions)
    layers = num_layers * attention + num_dense * 3 * D * config.base_mlp_dim
    if config.moe is not None:
        layers += (num_layers - num_dense) * _experts(config.moe)
    return 6.0 * (layers + D * config.vocab_size)


def _positions(config: LlamaConfig | DeepseekConfig, kind: int, length: int) -> float:
    """Returns the positions that a token attends to, on average."""
    window = config.attention_scores[kind].window
    if window is None or window >= length:
        return length / 2
    return window - window**2 / (2 * length)


def _grouped_attention(sizes: AttentionSizes, positions: float) -> float:
    """Returns the multiply-adds of a token, forward only."""
    D, H, K, C = sizes
    scores = 2 * H * C * positions
    return 2 * D * H * C + 2 * D * K * C + scores


def _latent_attention(settings: LatentAttentionSettings, positions: float) -> float:
    """Returns the multiply-adds of a token, forward only."""
    D, H, C, V = settings.embed_dim, settings.num_heads, settings.head_dim, settings.v_head_dim
    low, rank = settings.q_lora_rank, settings.kv_lora_rank
    queries = D * low + low * H * C if low else D * H * C
    latents = D * (rank + settings.qk_rope_head_dim)
    heads = rank * H * (settings.qk_nope_head_dim + V)
    scores = H * (C + V) * positions
    return queries + latents + heads + H * V * D + scores


def _experts(settings: MoeSettings) -> int:
    """Returns the multiply-adds of a token in the router and the experts, forward only."""
    experts = settings.router.num_chosen + settings.shared_experts
    return settings.embed_dim * (settings.num_experts + experts * 3 * settings.expert_dim)
