"""The llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

b sequences, T tokens, D embed, H query heads, K key and value heads, C channels of a head, V vocab.
Touvron et al., 2023, arXiv 2302.13971 and 2307.09288; Dubey et al., 2024, arXiv 2407.21783.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PyTree

from ..autodiff.staged_model import run_layers
from ..kernels import Attention, attend_to_past
from ..sharding import Constrain
from ._boundary import boundary_weights, embed_tokens, next_token_loss
from .layers._common import (
    ACTIVATION,
    HEADS,
    Frequencies,
    Rope,
    dropout,
    name_qkv,
    rms_norm,
    rope,
    rope_frequencies,
    swiglu,
    swiglu_weights,
)
from .layers._projection import Projection, projection
from .weights._abstract import matrix, scale, stack_weights


class AttentionSizes(NamedTuple):
    """Sizes of grouped-query attention."""

    embed_dim: int  # D
    num_query_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # C


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a llama, with MaxText's names.

    Attributes:
        base_emb_dim: D.
        base_num_decoder_layers: The number of layers.
        base_num_query_heads: H.
        base_num_kv_heads: K, a divisor of H.
        base_mlp_dim: Width of the gated MLP.
        head_dim: C, an even number.
        vocab_size: V.
        rope_max_timescale: The base of the rotary angles.
        rope_type: `default`, or `llama3.1` for its stretched wavelengths.
        llama31_rope_factor: The factor by which `llama3.1` stretches wavelengths: 8 in Llama 3.1,
            32 in 3.2.
        normalization_layer_epsilon: Added to the mean square in RMSNorm.
        logits_via_embedding: Whether the logits are computed with the embedding's table (tied).
    """

    base_emb_dim: int
    base_num_decoder_layers: int
    base_num_query_heads: int
    base_num_kv_heads: int
    base_mlp_dim: int
    head_dim: int
    vocab_size: int
    rope_max_timescale: float = 10_000.0
    rope_type: str = "default"
    llama31_rope_factor: float = 8.0
    normalization_layer_epsilon: float = 1e-5
    logits_via_embedding: bool = False

    def __post_init__(self):
        if self.base_num_query_heads % self.base_num_kv_heads:
            raise ValueError(
                f"`base_num_query_heads` is {self.base_num_query_heads}, not a multiple of "
                f"`base_num_kv_heads` = {self.base_num_kv_heads}. Every group of query heads "
                "shares one key and value head."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"`head_dim` is {self.head_dim}. Rotary positions need an even number."
            )
        if self.rope_type not in ("default", "llama3.1"):
            raise ValueError(f"`rope_type` is {self.rope_type!r}. Give 'default' or 'llama3.1'.")

    @property
    def frequencies(self) -> Frequencies:
        """Returns the rotary angles per position of each pair of channels, in radians."""
        stretch = self.llama31_rope_factor if self.rope_type == "llama3.1" else 1.0
        return rope_frequencies(self.head_dim, self.rope_max_timescale, llama31_factor=stretch)

    @property
    def attention(self) -> AttentionSizes:
        """Returns the sizes of the attention of a layer."""
        return AttentionSizes(
            self.base_emb_dim, self.base_num_query_heads, self.base_num_kv_heads, self.head_dim
        )


def llama_weights(
    config: LlamaConfig, dtype: Any = jnp.float32, *, layers_after: int = 0
) -> dict[str, Any]:
    """Returns the abstract weights of a llama.

    Args:
        config: The sizes of the model.
        dtype: The dtype in which weights are stored.
        layers_after: The number of last layers that run after the pipeline, with the loss. Their
            weights are `["head"]["layers"]`, stacked.

    Returns:
        `{"embed", "layer", "head"}`: trees of `Weight`. "layer" is one layer, unstacked.

    Example:
        >>> config = LlamaConfig(64, 8, 4, 2, base_mlp_dim=192, head_dim=16, vocab_size=320)
        >>> weights = llama_weights(config)
        >>> weights["layer"]["mlp"]["up"].shape, weights["layer"]["mlp"]["up"].axes
        ((64, 192), ('embed', 'mlp'))
    """
    boundary = boundary_weights(
        config.base_emb_dim, config.vocab_size, tied=config.logits_via_embedding, dtype=dtype
    )
    layer = _layer_weights(
        config.attention,
        config.base_mlp_dim,
        # The initial output of a residual branch is smaller in deeper models, as in GPT-2.
        branches=2 * config.base_num_decoder_layers,
        dtype=dtype,
    )
    if layers_after:
        boundary["head"]["layers"] = stack_weights(layer, (layers_after,), ("layers",))
    return boundary | {"layer": layer}


def _layer_weights(
    attention: AttentionSizes, mlp_dim: int, *, branches: int, dtype: Any
) -> dict[str, Any]:
    D, H, K, C = attention
    return {
        "attention_norm": scale(D, dtype),
        "attention": {
            "query": matrix((D, H, C), ("embed", "q_heads", "kv"), D, dtype),
            "key": matrix((D, K, C), ("embed", "kv_heads", "kv"), D, dtype),
            "value": matrix((D, K, C), ("embed", "kv_heads", "kv"), D, dtype),
            "out": matrix((H, C, D), ("q_heads", "kv", "embed"), H * C * branches, dtype),
        },
        "mlp_norm": scale(D, dtype),
        "mlp": swiglu_weights(D, mlp_dim, branches=branches, dtype=dtype),
    }


def llama(
    config: LlamaConfig,
    *,
    attention: Attention,
    constrain: Constrain,
    dtype: Any = jnp.float32,
    dropout_rate: float = 0.0,
    num_vocab_tiling: int = 1,
    outside_remat: Callable[[Callable], Callable] = lambda f: f,
    project: Projection = projection,
    rotate: Rope = rope,
    z_loss_multiplier: float = 0.0,
) -> tuple[Callable, Callable, Callable]:
    """Returns `(embed, layer, loss)` of a llama, pure functions of one microbatch.

    If `batch_inputs` is a pair with the `Past` of earlier slices, `layer` runs a slice of each
    sequence, and returns `(y, (aux, past))`. Slices attend by `attend_to_past`, not by `attention`.

    `batch_inputs` has `tokens`, `positions`, `segment_ids`, `targets` [b, T] and `target_weights`
    [b, T], the weight of each token in the loss of the batch.

    Args:
        config: The sizes of the model.
        attention: `(q, k, v, segment_ids) -> out`.
        constrain: Shards an activation by its logical axes.
        dtype: The dtype in which layers compute. Norms, angles and the loss use float32.
        dropout_rate: The fraction of each residual branch that is dropped. It is 0 where a layer
            gets no key, and in the layers after the pipeline.
        num_vocab_tiling: The number of chunks of tokens in which the logits are computed.
        outside_remat: Wraps one layer after the pipeline. Engines rematerialize stages, but not
            `loss`.
        project: The matrix products of layers: `projection`, or `fp8_projection`.
        rotate: The rotary positions: `rope`, or `rope_by_product` for TPUs.
        z_loss_multiplier: The factor of the z-loss, see `next_token_loss`. 0 omits it.

    Returns:
        `embed(weights, batch_inputs) -> x`, `layer(weights, x, batch_inputs, key) -> (y, aux)`
        and `loss(boundary, x, batch_inputs) -> (loss, metrics)`, where x and y are [b, T, D].
    """
    frequencies = config.frequencies
    epsilon = config.normalization_layer_epsilon

    def embed(weights: PyTree, batch_inputs: PyTree) -> Float[Array, "b T D"]:
        return embed_tokens(
            weights["table"], batch_inputs["tokens"], constrain=constrain, dtype=dtype
        )

    def run_layer(w: PyTree, x: Float[Array, "b T D"], batch_inputs: PyTree, key, attend: Callable):
        first, second = (key, key) if isinstance(key, tuple) else jax.random.split(key)
        x = checkpoint_name(x, "decoder_layer_input")
        h = rms_norm(x, w["attention_norm"], epsilon)
        h = _attend(w["attention"], h, batch_inputs, attend)
        x = constrain(x + dropout(h, dropout_rate, first), ACTIVATION)
        h = swiglu(w["mlp"], rms_norm(x, w["mlp_norm"], epsilon), constrain, project)
        return constrain(x + dropout(h, dropout_rate, second), ACTIVATION)

    def _attend(w, x, batch_inputs: PyTree, attend: Callable):
        q, k, v = (
            constrain(project(x, w[name]), axes)
            for name, axes in (("query", HEADS), ("key", _KEY), ("value", _KEY))
        )
        q, k = (rotate(heads, batch_inputs["positions"], frequencies) for heads in (q, k))
        out = constrain(attend(*name_qkv(q, k, v), batch_inputs["segment_ids"]), HEADS)
        return checkpoint_name(project(out, w["out"]), "out_proj")

    layer = _of_slices_too(run_layer, attention)
    loss_of_tokens = partial(next_token_loss, epsilon=epsilon, z_loss_multiplier=z_loss_multiplier)
    token_loss = partial(loss_of_tokens, constrain=constrain, num_chunks=num_vocab_tiling)

    def loss(boundary: PyTree, x: Float[Array, "b T D"], batch_inputs: PyTree):
        if "layers" in boundary["head"]:
            x, _ = run_layers(outside_remat(layer), boundary["head"]["layers"], x, batch_inputs)
        return token_loss(boundary, x, batch_inputs)

    return embed, layer, loss


def _of_slices_too(run: Callable, attention: Attention) -> Callable:
    """Returns a layer of whole sequences, which also takes `(batch_inputs, past)` of a slice."""

    def layer(w: PyTree, x: Float[Array, "b T D"], batch_inputs: PyTree, key: Any) -> Any:
        if not isinstance(batch_inputs, tuple):
            return run(w, x, batch_inputs, key, attention), {}
        inputs, past = batch_inputs
        carried = []

        def attend(q: Array, k: Array, v: Array, segment_ids: Array) -> Array:
            (k, v, key_segment_ids), past_with_new = past.append((k, v, segment_ids))
            carried.append(past_with_new)
            mask = past.causal_mask(q.shape[1])
            return attend_to_past(q, k, v, key_segment_ids, segment_ids, mask)

        y = run(w, x, inputs, key, attend)
        return y, ({}, carried.pop())

    return layer


_KEY = ("activation_batch", "activation_length", "activation_kv_heads", "activation_kv")
