"""Counts the floating-point operations of a training step per token, as papers do.

Every weight that a token is multiplied by counts 6 (2 forward, 4 backward). Attention counts the
causal half of the T x T scores and of the sums of values, or what a window leaves of it. Chunks of
Llama 4 leave all of it, as kernels compute it. Embedding look-ups and rematerialization are not
counted.
"""

import math
from typing import Any

import jax
from jaxtyping import PyTree

from ._families import ModelConfig
from .weights import is_weight


def matmul_flops_per_token(config: ModelConfig, weights: dict[str, Any], length: int) -> float:
    """Returns the floating-point operations of forward and backward per token.

    Args:
        config: The sizes of the model.
        weights: Its abstract weights, as its family makes them: `embed`, `head` and one `layer`.
        length: The length of the sequences, in tokens.

    Returns:
        Floating-point operations per token.

    Example:
        >>> from jaxpipe.models import PRESETS, LlamaConfig, llama_weights
        >>> sizes = LlamaConfig(**PRESETS["llama-tiny"])
        >>> matmul_flops_per_token(sizes, llama_weights(sizes), length=128)
        2875392.0
    """
    num_layers, num_blocks = config.base_num_decoder_layers, config.num_blocks
    # All layers of a block but the last are of kind 0.
    kinds = (config.layer_kinds or (0,) * num_blocks) + (0,) * (num_layers - num_blocks)
    scores = config.attention.score_products * sum(
        _positions(config, kind, length) for kind in kinds
    )
    layers = config.num_pipeline_layers * _multiplied(config, weights["layer"])
    layers += _multiplied(config, weights["embed"].get("layers", {}))
    return 6.0 * (layers + scores + config.base_emb_dim * config.vocab_size)


def _multiplied(config: ModelConfig, weights: PyTree) -> float:
    """Returns the weights that a token is multiplied by: of experts, those that it chooses."""
    moe = config.moe
    share = moe.router.num_chosen / moe.num_experts if moe else 1.0
    products = (
        math.prod(weight.shape) * (share if "exp" in weight.axes else 1.0)
        for weight in jax.tree.leaves(weights, is_leaf=is_weight)
        if not weight.is_bias and "norm" not in weight.axes
    )
    return sum(products, start=0.0)


def _positions(config: ModelConfig, kind: int, length: int) -> float:
    """Returns the positions that a token attends to, on average."""
    window = config.attention_scores[kind].window
    if window is None or window >= length:
        return length / 2
    return window - window**2 / (2 * length)
