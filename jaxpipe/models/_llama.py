"""The llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU or experts of it.

Llama, Mistral and Qwen3 have an MLP in every layer, Mixtral and Qwen3-MoE routed experts. Qwen3
also normalizes queries and keys. Layers may be of several kinds, which have weights of the same
shapes and differ in attention, as those of Gemma 3 and gpt-oss.

b sequences, T tokens, D embed, H query heads, K key and value heads, C channels of a head, V vocab.
Touvron et al., 2023, arXiv 2302.13971 and 2307.09288; Dubey et al., 2024, arXiv 2407.21783; Jiang
et al., 2023 and 2024, arXiv 2310.06825 and 2401.04088; Yang et al., 2025, arXiv 2505.09388.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PyTree

from ..autodiff.staged_model import Past
from ..kernels import Attention, Scores, attend_to_past
from ..sharding import Constrain
from ._boundary import boundary_weights, embed_tokens, loss_after_layers, next_token_loss
from ._sizes import DecoderSizes, check_even, check_num_chosen
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
)
from .layers._gated_mlp import GatedMlp, Mlp
from .layers._moe import MoeSettings, moe, moe_weights
from .layers._projection import Projection, projection
from .layers._routed_experts import Experts
from .layers._router import RouterSettings
from .weights._abstract import Weight, matrix, scale, stack_weights, zero_bias

Kinds = tuple[Any, ...]
"""The index of the kind of each layer of a block: a Python integer, or a traced scalar."""

_MOST_CHUNKS = 2**15  # of a document, of which a row has less than 2**16
_KEY = ("activation_batch", "activation_length", "activation_kv_heads", "activation_kv")


class AttentionSizes(NamedTuple):
    """Sizes of grouped-query attention."""

    embed_dim: int  # D
    num_query_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # C

    @property
    def score_products(self) -> int:
        """Returns the multiply-adds of a token for each position that it attends to."""
        return 2 * self.num_query_heads * self.head_dim


@dataclass(frozen=True)
class LlamaConfig(DecoderSizes):
    """Sizes of a llama, with MaxText's names.

    Attributes:
        base_emb_dim: D, the width of embeddings and of x.
        base_num_decoder_layers: The number of layers.
        base_num_query_heads: H, the number of query heads.
        base_num_kv_heads: K, a divisor of H.
        base_mlp_dim: Width of the gated MLP.
        head_dim: C, an even number.
        vocab_size: V, the number of tokens in the vocabulary.
        rope_max_timescale: The base of the rotary angles.
        rope_type: One of `rope_types` of the class: `default`, or `llama3.1` for its stretched
            wavelengths.
        llama31_rope_factor: The factor by which `llama3.1` stretches wavelengths: 8 in Llama 3.1,
            32 in 3.2.
        normalization_layer_epsilon: Added to the mean square in RMSNorm.
        logits_via_embedding: Whether the logits are computed with the embedding's table (tied).
        use_qk_norm: Whether every head of queries and keys is normalized: before it is rotated, as
            in Qwen3, or behind it and without scales, as in Llama 4.
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
    use_qk_norm: bool = False

    # What all models of a family have, and no key says.
    has_post_norms: ClassVar[bool] = False  # whether results of attention and MLP are normalized
    scales_embedding: ClassVar[bool] = False  # whether embeddings are multiplied by sqrt(D)
    rope_types: ClassVar[tuple[str, ...]] = ("default", "llama3.1")
    qk_norm_has_scales: ClassVar[bool] = True

    def __post_init__(self):
        if self.base_num_query_heads % self.base_num_kv_heads:
            raise ValueError(
                f"`base_num_query_heads` is {self.base_num_query_heads}, not a multiple of "
                f"`base_num_kv_heads` = {self.base_num_kv_heads}. Every group of query heads "
                "shares one key and value head."
            )
        check_even("head_dim", self.head_dim)
        self._check_rope_type()

    @property
    def frequencies(self) -> Frequencies:
        """Returns the rotary angles per position of each pair of channels, in radians.

        They are [C / 2], or [kinds, C / 2] if there are several kinds of layers.
        """
        stretch = self.llama31_rope_factor if self.rope_type == "llama3.1" else 1.0
        return rope_frequencies(self.head_dim, self.rope_max_timescale, llama31_factor=stretch)

    def after_rotation(
        self,
        q: Float[Array, "b T H C"],
        k: Float[Array, "b T K C"],
        positions: Int[Array, "b T"],
        kind: Any,
    ) -> tuple[Float[Array, "b T H C"], Float[Array, "b T K C"]]:
        """Returns rotated queries and keys as the scores of a kind of layers take them."""
        del positions, kind
        return q, k

    @property
    def attention(self) -> AttentionSizes:
        """Returns the sizes of the attention of a layer."""
        return AttentionSizes(
            self.base_emb_dim, self.base_num_query_heads, self.base_num_kv_heads, self.head_dim
        )

    @property
    def mlp(self) -> Mlp:
        """Returns the MLP of a layer without experts."""
        return GatedMlp(self.base_emb_dim, self.base_mlp_dim)

    @property
    def moe(self) -> MoeSettings | None:
        """Returns the settings of the experts of a layer; None if it has one MLP."""
        return None


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(LlamaConfig):
    """Sizes of a llama with routed experts in place of every MLP, such as Mixtral or Qwen3-MoE.

    Attributes:
        base_moe_mlp_dim: Width of one expert. As in MaxText `base_mlp_dim` must be the same.
        num_experts: The number of experts.
        num_experts_per_tok: The number of experts that each token is sent to.
        norm_topk_prob: Whether the weights of a token's chosen experts are normalized to sum to 1.
        load_balance_loss_weight: Factor of each layer's load-balance loss.
    """

    base_moe_mlp_dim: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = True
    load_balance_loss_weight: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.layers_per_block == 1 and self.base_mlp_dim != self.base_moe_mlp_dim:
            raise ValueError(
                f"`base_mlp_dim` is {self.base_mlp_dim} and `base_moe_mlp_dim` "
                f"{self.base_moe_mlp_dim}, but every layer has experts and no other MLP. Give both "
                "the width of an expert."
            )
        check_num_chosen(self.num_experts_per_tok, self.num_experts)

    @property
    def moe(self) -> MoeSettings:
        """Returns the settings of the experts of a layer."""
        return MoeSettings(
            embed_dim=self.base_emb_dim,
            num_experts=self.num_experts,
            expert_dim=self.base_moe_mlp_dim,
            load_balance_loss_weight=self.load_balance_loss_weight,
            router=RouterSettings(
                score_func="softmax",
                num_chosen=self.num_experts_per_tok,
                normalized=self.norm_topk_prob,
            ),
        )


def llama_weights(
    config: LlamaConfig, dtype: Any = jnp.float32, *, layers_after: int = 0
) -> dict[str, Any]:
    """Returns the abstract weights of a llama, or of one with experts.

    Args:
        config: The sizes of the model. A `MixtureConfig` has experts.
        dtype: The dtype in which weights are stored.
        layers_after: The number of last blocks, of `layers_per_block` layers each, that run after
            the pipeline, with the loss. Their weights are `["head"]["layers"]`, stacked.

    Returns:
        `{"embed", "layer", "head"}`: trees of `Weight`. "layer" is one block, unstacked: the layer
        itself, or `layer_0`, `layer_1`, ...

    Example:
        >>> config = LlamaConfig(64, 8, 4, 2, base_mlp_dim=192, head_dim=16, vocab_size=320)
        >>> weights = llama_weights(config)
        >>> weights["layer"]["mlp"]["up"].shape, weights["layer"]["mlp"]["up"].axes
        ((64, 192), ('embed', 'mlp'))
    """
    boundary = boundary_weights(
        config.base_emb_dim,
        config.vocab_size,
        tied=config.logits_via_embedding,
        dtype=dtype,
        norm_offset=config.norm_offset,
    )
    # If the model has experts, the last layer of a block has them.
    count = config.layers_per_block
    layers = [_layer_weights(config, dtype, has_experts=i == count - 1) for i in range(count)]
    layer = {_name(i): layer for i, layer in enumerate(layers)} if count > 1 else layers[0]
    if layers_after:
        boundary["head"]["layers"] = stack_weights(layer, (layers_after,), ("layers",))
    return boundary | {"layer": layer}


def _name(index: int) -> str:
    return f"layer_{index}"


def _layer_weights(config: LlamaConfig, dtype: Any, *, has_experts: bool) -> dict[str, Any]:
    D, H, K, C = config.attention
    # The initial output of a residual branch is smaller in deeper models, as in GPT-2.
    branches = 2 * config.base_num_decoder_layers
    attention = {
        "query": matrix((D, H, C), ("embed", "q_heads", "kv"), D, dtype),
        "key": matrix((D, K, C), ("embed", "kv_heads", "kv"), D, dtype),
        "value": matrix((D, K, C), ("embed", "kv_heads", "kv"), D, dtype),
        "out": matrix((H, C, D), ("q_heads", "kv", "embed"), H * C * branches, dtype),
    }
    offset, norms = config.norm_offset, ["attention_norm", "mlp_norm"]
    if config.use_qk_norm and config.qk_norm_has_scales:
        attention |= {name: scale(C, dtype, offset) for name in ("query_norm", "key_norm")}
    if config.has_biases_and_sinks:
        attention |= _biases_and_sinks(config.attention, dtype)
    if config.has_post_norms:
        norms += ["post_attention_norm", "post_mlp_norm"]
    layer = {"attention": attention, **{name: scale(D, dtype, offset) for name in norms}}
    if config.moe is None or not has_experts:
        return layer | {"mlp": config.mlp.weights(branches=branches, dtype=dtype)}
    return layer | {"moe": moe_weights(config.moe, branches=branches, dtype=dtype)}


def _biases_and_sinks(sizes: AttentionSizes, dtype: Any) -> dict[str, Weight]:
    D, H, K, C = sizes
    return {
        "query_bias": zero_bias((H, C), ("q_heads", "kv"), dtype),
        "key_bias": zero_bias((K, C), ("kv_heads", "kv"), dtype),
        "value_bias": zero_bias((K, C), ("kv_heads", "kv"), dtype),
        "out_bias": zero_bias((D,), ("norm",), dtype),
        "sinks": zero_bias((H,), ("q_heads",), dtype, exact=True),
    }


def llama(
    config: LlamaConfig,
    *,
    attention: Attention | tuple[Attention, ...],
    constrain: Constrain,
    experts: Experts | None = None,
    dtype: Any = jnp.float32,
    dropout_rate: float = 0.0,
    num_vocab_tiling: int = 1,
    outside_remat: Callable[[Callable], Callable] = lambda f: f,
    project: Projection = projection,
    rotate: Rope = rope,
    z_loss_multiplier: float = 0.0,
) -> tuple[Callable, Callable, Callable]:
    """Returns `(embed, layer, loss)` of a llama, pure functions of one microbatch.

    With experts, `layer` returns load-balance losses, which engines add to the loss; `loss` adds
    those of layers after the pipeline.

    If layers are of several kinds, `layer` is given the pair of its key and the index of its kind
    in place of its key.

    Given the `Past` of earlier slices behind the key, `layer` runs a slice of each sequence, and
    returns `(y, (aux, past))`. Slices attend by `attend_to_past`, not by `attention`.

    `batch_inputs` has `tokens`, `positions`, `segment_ids`, `targets` [b, T] and `target_weights`
    [b, T], the weight of each token in the loss of the batch.

    Args:
        config: The sizes of the model.
        attention: `(q, k, v, segment_ids) -> out`, or with sinks behind them for a config that has
            them; for several kinds of layers a function for each of `config.attention_scores`.
        constrain: Shards an activation by its logical axes.
        experts: The result of `routed_experts`: `(weights, x, chosen, shares, *, gated,
            scales_inputs) -> y`. Only a `MixtureConfig` needs it.
        dtype: The dtype in which layers compute. Norms, angles, routers and the loss use float32.
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

    Raises:
        ValueError: If `config` is a `MixtureConfig` and `experts` is missing, or if there are more
            or fewer functions of attention than kinds of layers.
    """
    if config.moe is not None and experts is None:
        raise ValueError("`config` is a `MixtureConfig`, and `experts` is missing. Give it.")
    attentions = attention if isinstance(attention, tuple) else (attention,)
    if len(attentions) != len(config.attention_scores):
        raise ValueError(
            f"`attention` has {len(attentions)} functions, and layers are of "
            f"{len(config.attention_scores)} kinds. Give one for each of `config.attention_scores`."
        )
    epsilon, offset = config.normalization_layer_epsilon, config.norm_offset
    norm = partial(rms_norm, epsilon=epsilon, offset=offset)
    attention_of = _attention(config, norm, constrain, project, rotate)
    feed_forward = _feed_forward(config, experts, constrain, project)

    def embed(weights: PyTree, batch_inputs: PyTree) -> Float[Array, "b T D"]:
        x = embed_tokens(weights["table"], batch_inputs["tokens"], constrain=constrain, dtype=dtype)
        return x * jnp.asarray(config.base_emb_dim**0.5, dtype) if config.scales_embedding else x

    def run_layer(
        w: PyTree, x: Float[Array, "b T D"], batch_inputs: PyTree, key, kind, attend: Callable
    ):
        first, second = (key, key) if isinstance(key, tuple) else jax.random.split(key)
        h = norm(x, w["attention_norm"], is_layer_input=True)
        h = attention_of(w["attention"], h, batch_inputs, kind, attend)
        h = norm(h, w["post_attention_norm"]) if config.has_post_norms else h
        x = constrain(x + dropout(h, dropout_rate, first), ACTIVATION)
        h, aux = feed_forward(w, norm(x, w["mlp_norm"]), batch_inputs)
        h = norm(h, w["post_mlp_norm"]) if config.has_post_norms else h
        return constrain(x + dropout(h, dropout_rate, second), ACTIVATION), aux

    count = config.layers_per_block
    layer = _block_of_kinds(_block(run_layer, count), count, config.attention_scores, attentions)
    token_loss = partial(
        next_token_loss,
        epsilon=epsilon,
        z_loss_multiplier=z_loss_multiplier,
        constrain=constrain,
        num_chunks=num_vocab_tiling,
        norm_offset=offset,
    )
    loss = loss_after_layers(outside_remat(layer), token_loss, config.layer_kinds)
    return embed, layer, loss


def _block(run_layer: Callable, count: int) -> Callable:
    """Returns a block, which runs `count` layers in turn."""

    def run(
        w: PyTree, x: Float[Array, "b T D"], batch_inputs: PyTree, key, kinds: Kinds, attends: Any
    ):
        x = checkpoint_name(x, "decoder_layer_input")
        keys, aux = [key] * count, {}
        if count > 1 and not isinstance(key, tuple):
            keys = jax.random.split(key, count)
        for i, (kind, attend) in enumerate(zip(kinds, attends, strict=True)):
            of_layer = w[_name(i)] if count > 1 else w
            x, aux = run_layer(of_layer, x, batch_inputs, keys[i], kind, attend)
        return x, aux

    return run


def _attention(
    config: LlamaConfig, norm: Callable, constrain: Constrain, project: Projection, rotate: Rope
) -> Callable:
    """Returns attention with its projections, `(weights, x, batch_inputs, kind, attend) -> y`."""
    frequencies = config.frequencies

    def run(w: PyTree, x: Array, batch_inputs: PyTree, kind: Any, attend: Callable) -> Array:
        q, k, v = (
            constrain(add_bias(project(x, w[name]), w, name), axes)
            for name, axes in (("query", HEADS), ("key", _KEY), ("value", _KEY))
        )
        if config.use_qk_norm and config.qk_norm_has_scales:
            q, k = norm(q, w["query_norm"]), norm(k, w["key_norm"])
        angles = jnp.asarray(frequencies)[kind] if config.layer_kinds else frequencies
        q, k = (rotate(heads, batch_inputs["positions"], angles) for heads in (q, k))
        q, k = config.after_rotation(q, k, batch_inputs["positions"], kind)
        sinks = (w["sinks"],) if config.has_biases_and_sinks else ()
        documents = batch_inputs["segment_ids"]
        if config.chunk:
            chunked = _in_chunks(documents, batch_inputs["positions"], config.chunk)
            documents = jnp.where(jnp.equal(kind, 0), chunked, documents)
        out = constrain(attend(*name_qkv(q, k, v), documents, *sinks), HEADS)
        return checkpoint_name(add_bias(project(out, w["out"]), w, "out"), "out_proj")

    def add_bias(y: Array, w: PyTree, name: str) -> Array:
        return y + w[f"{name}_bias"].astype(y.dtype) if config.has_biases_and_sinks else y

    return run


def _in_chunks(
    segment_ids: Int[Array, "b T"], positions: Int[Array, "b T"], chunk: int
) -> Int[Array, "b T"]:
    """Returns ids of documents in which every chunk of a document is one of its own.

    A slice is checked by its own length.
    """
    if positions.shape[1] > _MOST_CHUNKS * chunk:
        raise ValueError(
            f"{positions.shape[1]} tokens have more than {_MOST_CHUNKS} chunks of {chunk}. Give "
            "shorter sequences or longer chunks."
        )
    return segment_ids * _MOST_CHUNKS + positions // chunk


def _feed_forward(
    config: LlamaConfig, experts: Experts | None, constrain: Constrain, project: Projection
) -> Callable:
    """Returns the MLP or the experts as `(layer weights, x, batch_inputs) -> (y, aux)`."""
    mlp, mix = config.mlp, None
    if config.moe is not None and experts is not None:
        mix = moe(config.moe, experts=experts, constrain=constrain, project=project)

    def run(w: PyTree, x: Float[Array, "b T D"], batch_inputs: PyTree) -> Any:
        if mix is not None and "moe" in w:
            return mix(w["moe"], x, batch_inputs)
        return mlp.run(w["mlp"], x, constrain, project), {}

    return run


def _block_of_kinds(
    run: Callable, count: int, scores: tuple[Scores, ...], attentions: tuple[Attention, ...]
) -> Callable:
    """Returns a block that is given its kind with its key, and `past` if it runs a slice.

    Of its layers the last is of the kind that the block is given, and all others of kind 0.
    """

    def choose(kind: Any) -> Any:  # kinds of Llama 4 attend alike: their documents differ
        return kind if len({*scores}) > 1 else 0

    def layer(
        w: PyTree,
        x: Float[Array, "b T D"],
        batch_inputs: PyTree,
        key: Any,
        past: Past | None = None,
    ) -> Any:
        key, kind = key if len(scores) > 1 else (key, 0)
        kinds = (*(0,) * (count - 1), kind)
        if past is None:
            attends = [partial(_run_kind, choose(kind), attentions) for kind in kinds]
            return run(w, x, batch_inputs, key, kinds, attends)
        carried = []

        def attend(
            part: Past, kind: Any, q: Array, k: Array, v: Array, segment_ids: Array, *sinks: Array
        ) -> Array:
            (k, v, key_segment_ids), part_with_new = part.append((k, v, segment_ids))
            carried.append(part_with_new)

            def of_kind(scores: Scores, q: Array, k: Array, v: Array) -> Array:
                mask = part.causal_mask(q.shape[1], scores.window)
                of_keys = key_segment_ids, segment_ids, mask, scores.scale
                return attend_to_past(q, k, v, *of_keys, *sinks)

            return _run_kind(choose(kind), [partial(of_kind, each) for each in scores], q, k, v)

        attends = [
            partial(attend, part, kind) for part, kind in zip(past.split(count), kinds, strict=True)
        ]
        y, aux = run(w, x, batch_inputs, key, kinds, attends)
        return y, (aux, past.joined(carried))

    return layer


def _run_kind(kind: Any, functions: Sequence[Callable], *arguments: Any) -> Any:
    """Runs the function of a kind of layers.

    What differs between kinds is static, so that each has a kernel of its own. The condition is
    around attention alone: it would return copies of weights for the backward.
    """
    if isinstance(kind, int):
        return functions[kind](*arguments)
    return jax.lax.switch(kind, functions, *arguments)
