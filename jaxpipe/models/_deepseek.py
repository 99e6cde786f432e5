"""DeepSeek-V2 and V3: latent attention, a few dense layers, then mixtures of experts.

The dense layers run before the pipeline, in `embed`. Layers with experts run in the pipeline, but
the last ones may run after it, in `loss`. V3's multi-token prediction is not implemented.

The sizes have MaxText's names. b sequences, T tokens, D embed, H heads, E experts.
DeepSeek-AI, 2024, arXiv 2405.04434 and 2412.19437.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PyTree

from ..autodiff.staged_model import Past, run_layers, run_sliced_layers
from ..kernels import Attention
from ..sharding import Constrain
from ._boundary import boundary_weights, embed_tokens, loss_after_layers, next_token_loss
from ._sizes import DecoderSizes, check_even, check_num_chosen
from .layers._common import ACTIVATION, Rope, dropout, rms_norm, rope
from .layers._gated_mlp import GatedMlp
from .layers._latent_attention import (
    LatentAttentionSettings,
    latent_attention,
    latent_attention_weights,
)
from .layers._moe import MoeSettings, moe, moe_weights
from .layers._projection import Projection, projection
from .layers._routed_experts import Experts
from .layers._router import RouterSettings
from .layers._yarn import yarn_of
from .weights._abstract import scale, stack_weights

Remat = Callable[[Callable], Callable]


@dataclass(frozen=True)
class DeepseekConfig(DecoderSizes):
    """Sizes and choices of a model with latent attention and routed experts.

    Attributes:
        base_emb_dim: D, the width of embeddings and of x.
        base_num_decoder_layers: The number of layers, including the dense ones.
        first_num_dense_layers: The number of layers, from the first on, that have one MLP and no
            experts.
        base_num_query_heads: H. Every query head has its own key head and value head.
        base_mlp_dim: Width of the MLP of a dense layer.
        base_moe_mlp_dim: Width of one expert.
        num_experts: E, the number of routed experts.
        num_experts_per_tok: The number of routed experts that each token is sent to.
        shared_experts: The number of shared experts, which every token is sent to. They are one
            wide MLP.
        routed_score_func: `softmax` (V2) or `sigmoid` (V3), from router logits to scores.
        routed_bias: Whether a bias per expert, which the loss does not train, affects the choice.
        routed_scaling_factor: The factor by which the weights of the chosen experts are multiplied.
        norm_topk_prob: Whether the weights of a token's chosen experts are normalized to sum to 1
            before that.
        n_routing_groups: The number of groups of neighbouring experts; 1 for no groups.
        topk_routing_group: The number of groups from which a token may choose experts.
        group_score_experts: Groups are ranked by the sum of this many best experts: 1 in V2, 2 in
            V3.
        load_balance_loss_weight: Factor of each layer's load-balance loss.
        q_lora_rank: Width of the compressed queries; 0 if queries are not compressed.
        kv_lora_rank: Width of the compressed keys and values.
        qk_nope_head_dim: Channels of a query and key head without position.
        qk_rope_head_dim: Channels with rotary position, an even number. All key heads share them.
        v_head_dim: Channels of a value head.
        vocab_size: Number of tokens in the vocabulary.
        rope_max_timescale: The base of the rotary angles.
        rope_type: `default`, or `yarn` for angles stretched beyond the trained length.
        rope_factor: YaRN: the factor by which sequences may be longer than the trained length.
        original_max_position_embeddings: YaRN: the trained length, in tokens.
        beta_fast: YaRN: pairs of channels that turn more often within the trained length are not
            changed.
        beta_slow: YaRN: pairs that turn less often within the trained length are stretched in full.
        mscale: YaRN: how strongly attention scores grow with the logarithm of `rope_factor`.
        normalization_layer_epsilon: Added to the mean square in RMSNorm.
    """

    base_emb_dim: int
    base_num_decoder_layers: int
    first_num_dense_layers: int
    base_num_query_heads: int
    base_mlp_dim: int
    base_moe_mlp_dim: int
    num_experts: int
    num_experts_per_tok: int
    shared_experts: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    vocab_size: int
    q_lora_rank: int = 0
    routed_score_func: str = "softmax"
    routed_bias: bool = False
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = False
    n_routing_groups: int = 1
    topk_routing_group: int = 1
    group_score_experts: int = 2
    load_balance_loss_weight: float = 0.0
    rope_max_timescale: float = 10_000.0
    rope_type: str = "default"
    rope_factor: float = 40.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    normalization_layer_epsilon: float = 1e-6

    rope_types: ClassVar[tuple[str, ...]] = ("default", "yarn")

    def __post_init__(self):
        self._check_choices()
        self._check_experts()
        self._check_heads()

    @property
    def num_dense_layers(self) -> int:
        """Returns the number of first layers with one MLP, which run before the pipeline."""
        return self.first_num_dense_layers

    @property
    def mlp(self) -> GatedMlp:
        """Returns the MLP of a dense layer."""
        return GatedMlp(self.base_emb_dim, self.base_mlp_dim)

    @property
    def attention(self) -> LatentAttentionSettings:
        """Returns the settings of the attention of a layer."""
        return LatentAttentionSettings(
            embed_dim=self.base_emb_dim,
            num_heads=self.base_num_query_heads,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            max_timescale=self.rope_max_timescale,
            yarn=yarn_of(self) if self.rope_type == "yarn" else None,
            epsilon=self.normalization_layer_epsilon,
        )

    @property
    def moe(self) -> MoeSettings:
        """Returns the settings of the mixture of experts of a layer."""
        return MoeSettings(
            embed_dim=self.base_emb_dim,
            num_experts=self.num_experts,
            expert_dim=self.base_moe_mlp_dim,
            shared_experts=self.shared_experts,
            has_choice_bias=self.routed_bias,
            load_balance_loss_weight=self.load_balance_loss_weight,
            router=RouterSettings(
                score_func=self.routed_score_func,
                num_chosen=self.num_experts_per_tok,
                normalized=self.norm_topk_prob,
                scaling_factor=self.routed_scaling_factor,
                num_groups=self.n_routing_groups,
                num_kept_groups=self.topk_routing_group,
                num_ranking=self.group_score_experts,
            ),
        )

    def _check_choices(self) -> None:
        if self.routed_score_func not in ("softmax", "sigmoid"):
            raise ValueError(
                f"`routed_score_func` is {self.routed_score_func!r}. Give 'softmax' or 'sigmoid'."
            )
        self._check_rope_type()
        if self.rope_type == "yarn":
            yarn_of(self)  # checks its numbers
        if not 0 <= self.first_num_dense_layers < self.base_num_decoder_layers:
            raise ValueError(
                f"`first_num_dense_layers` is {self.first_num_dense_layers} of "
                f"`base_num_decoder_layers` = {self.base_num_decoder_layers}. Give 0 or more, and "
                "leave at least one layer with experts."
            )

    def _check_experts(self) -> None:
        groups, eligible = self.n_routing_groups, self.topk_routing_group
        if groups < 1 or self.num_experts % groups or not 1 <= eligible <= groups:
            raise ValueError(
                f"`num_experts` is {self.num_experts}, `n_routing_groups` {groups} and "
                f"`topk_routing_group` {eligible}. Groups must be equal, and a token "
                "chooses from 1 to all of them."
            )
        per_group = self.num_experts // groups
        if groups > 1 and per_group < self.group_score_experts:
            raise ValueError(
                f"`n_routing_groups` is {groups} for {self.num_experts} experts. Groups are ranked "
                f"by their {self.group_score_experts} best experts (`group_score_experts`): give "
                "fewer groups."
            )
        check_num_chosen(self.num_experts_per_tok, eligible * per_group)

    def _check_heads(self) -> None:
        check_even("qk_rope_head_dim", self.qk_rope_head_dim)
        channels = self.attention.head_dim
        if self.v_head_dim > channels:
            raise ValueError(
                f"`v_head_dim` is {self.v_head_dim}, more than the {channels} of "
                "`qk_nope_head_dim` + `qk_rope_head_dim`. Attention kernels take values of at most "
                "the keys' width."
            )


def deepseek_weights(
    config: DeepseekConfig, dtype: Any = jnp.float32, *, layers_after: int = 0
) -> dict[str, Any]:
    """Returns the abstract weights of a DeepSeek model.

    The pipeline has `base_num_decoder_layers - first_num_dense_layers - layers_after` layers.

    Args:
        config: The sizes of the model.
        dtype: The dtype in which weights are stored.
        layers_after: The number of last layers that run after the pipeline, with the loss. Their
            weights are `["head"]["layers"]`, stacked. (MaxText runs the first layers before its
            pipeline instead; the model is the same.)

    Returns:
        `{"embed", "layer", "head"}`: trees of `Weight`. "layer" is one layer with experts,
        unstacked.
    """
    D, dense_layers = config.base_emb_dim, config.first_num_dense_layers
    branches = 2 * config.base_num_decoder_layers
    boundary = boundary_weights(D, config.vocab_size, tied=False, dtype=dtype)
    layer: dict[str, Any] = {
        "attention_norm": scale(D, dtype),
        "attention": latent_attention_weights(config.attention, branches=branches, dtype=dtype),
        "mlp_norm": scale(D, dtype),
    }
    if dense_layers:
        mlp = config.mlp.weights(branches=branches, dtype=dtype)
        boundary["embed"]["layers"] = stack_weights(
            layer | {"mlp": mlp}, (dense_layers,), ("layers",)
        )
    layer["moe"] = moe_weights(config.moe, branches=branches, dtype=dtype)
    if layers_after:
        boundary["head"]["layers"] = stack_weights(layer, (layers_after,), ("layers",))
    return boundary | {"layer": layer}


def deepseek(
    config: DeepseekConfig,
    *,
    attention: Attention,
    experts: Experts,
    constrain: Constrain,
    dtype: Any = jnp.float32,
    dropout_rate: float = 0.0,
    num_vocab_tiling: int = 1,
    outside_remat: Remat = lambda f: f,
    project: Projection = projection,
    rotate: Rope = rope,
    z_loss_multiplier: float = 0.0,
) -> tuple[Callable, Callable, Callable]:
    """Returns `(embed, layer, loss)` of a DeepSeek model, pure functions of one microbatch.

    `batch_inputs` has what that of `llama` has. `layer` returns load-balance losses, which engines
    add to the loss; `loss` adds those of layers after the pipeline. Given the `Past` of earlier
    slices, `layer` returns `(y, (aux, past))` as that of `llama` does, and `embed` returns `(x,
    past)` with the state of the dense layers.

    Args:
        config: The sizes of the model.
        attention: `(q, k, v, segment_ids) -> out`.
        experts: The result of `routed_experts`: `(weights, x, chosen, shares, *, gated,
            scales_inputs) -> y`.
        constrain: Shards an activation by its logical axes.
        dtype: The dtype in which layers compute. Norms, angles, routers and the loss use float32.
        dropout_rate: Dropped fraction of each residual branch in a layer that gets a key, else 0.
        num_vocab_tiling: The number of chunks of tokens in which the logits are computed.
        outside_remat: Wraps one layer before or after the pipeline; engines remat stages alone.
        project: The products of attention and of dense and shared MLPs, as `projection`.
        rotate: Rotary positions: `rope`, or `rope_by_product` for TPUs.
        z_loss_multiplier: The factor of the z-loss, see `next_token_loss`. 0 omits it.

    Returns:
        `(embed, layer, loss)` as `llama` returns them.
    """
    epsilon, sizes = config.normalization_layer_epsilon, config.attention
    how = {"constrain": constrain, "project": project}
    attend = latent_attention(sizes, attention=attention, rotate=rotate, **how)
    mix = moe(config.moe, experts=experts, **how)

    def add(x, branch, key):
        return constrain(x + dropout(branch, dropout_rate, key), ACTIVATION)

    def add_attention(w: PyTree, x: Float[Array, "b T D"], inputs: PyTree, past: Past | None, key):
        x = checkpoint_name(x, "decoder_layer_input")
        h = rms_norm(x, w["attention_norm"], epsilon, is_layer_input=True)
        if past is None:
            return add(x, attend(w["attention"], h, inputs), key), None
        y, past = attend(w["attention"], h, inputs, past)
        return add(x, y, key), past

    def dense_layer(
        w: PyTree, x: Float[Array, "b T D"], inputs: PyTree, _, past: Past | None = None
    ):
        x, past = add_attention(w, x, inputs, past, ())
        y = config.mlp.run(w["mlp"], rms_norm(x, w["mlp_norm"], epsilon), constrain, project)
        return add(x, y, ()), {} if past is None else ({}, past)

    def layer(w: PyTree, x: Float[Array, "b T D"], inputs: PyTree, key, past: Past | None = None):
        first, second = (key, key) if isinstance(key, tuple) else jax.random.split(key)
        x, past = add_attention(w, x, inputs, past, first)
        y, aux = mix(w["moe"], rms_norm(x, w["mlp_norm"], epsilon), inputs)
        return add(x, y, second), aux if past is None else (aux, past)

    def embed(weights: PyTree, inputs: PyTree, past: Past | None = None) -> Any:
        x = embed_tokens(weights["table"], inputs["tokens"], constrain=constrain, dtype=dtype)
        if past is not None:
            if "layers" in weights:
                layers = weights["layers"]
                x, _, past = run_sliced_layers(dense_layer, layers, x, inputs, (), past)
            return x, past
        if "layers" in weights:
            x, _ = run_layers(outside_remat(dense_layer), weights["layers"], x, inputs)
        return x

    token_loss = partial(next_token_loss, epsilon=epsilon, z_loss_multiplier=z_loss_multiplier)
    token_loss = partial(token_loss, constrain=constrain, num_chunks=num_vocab_tiling)
    return embed, layer, loss_after_layers(outside_remat(layer), token_loss)
