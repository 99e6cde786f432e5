"""Sizes of a DeepSeek-V2 or V3 model, with MaxText's names.

D embed, H heads, E experts.
"""

from dataclasses import dataclass

from .layers._latent_attention import LatentAttentionSettings
from .layers._moe import MoeSettings
from .layers._router import RouterSettings
from .layers._yarn import Yarn


@dataclass(frozen=True)
class DeepseekConfig:
    """Sizes and choices of a model with latent attention and routed experts.

    Attributes:
        base_emb_dim: D.
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

    def __post_init__(self):
        self._check_choices()
        self._check_experts()
        self._check_heads()

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
            yarn=self._yarn if self.rope_type == "yarn" else None,
            epsilon=self.normalization_layer_epsilon,
        )

    @property
    def _yarn(self) -> Yarn:
        return Yarn(
            factor=self.rope_factor,
            trained_length=self.original_max_position_embeddings,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            mscale=self.mscale,
        )

    @property
    def moe(self) -> MoeSettings:
        """Returns the settings of the mixture of experts of a layer."""
        return MoeSettings(
            embed_dim=self.base_emb_dim,
            num_experts=self.num_experts,
            expert_dim=self.base_moe_mlp_dim,
            shared_experts=self.shared_experts,
            has_bias=self.routed_bias,
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
        if self.rope_type not in ("default", "yarn"):
            raise ValueError(f"`rope_type` is {self.rope_type!r}. Give 'default' or 'yarn'.")
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
        if not 1 <= self.num_experts_per_tok <= eligible * per_group:
            raise ValueError(
                f"`num_experts_per_tok` is {self.num_experts_per_tok}, and a token chooses among "
                f"{eligible * per_group} experts. Give 1 to {eligible * per_group}."
            )

    def _check_heads(self) -> None:
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"`qk_rope_head_dim` is {self.qk_rope_head_dim}. Rotary positions need an even "
                "number."
            )
        channels = self.attention.head_dim
        if self.v_head_dim > channels:
            raise ValueError(
                f"`v_head_dim` is {self.v_head_dim}, more than the {channels} of "
                "`qk_nope_head_dim` + `qk_rope_head_dim`. Attention kernels take values of at most "
                "the keys' width."
            )
