"""Llama 4 as a llama whose MLPs and experts take turns, without its vision tower.

A layer of the pipeline is a block of `interleave_moe_layer_step` layers, of which the last has
experts: blocks have weights of the same shapes, so they are one stack. Every
`nope_layer_interval`-th layer has no rotary positions and attends to all tokens before it; others
attend within chunks. Meta, 2025, https://ai.meta.com/blog/llama-4-multimodal-intelligence; scores
that grow with positions: Nakanishi, 2025, arXiv 2501.19399.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..kernels import Scores
from ._llama import MixtureConfig
from .layers._common import rms_norm
from .layers._moe import MoeSettings

_GROWTH, _TOKENS_OF_A_STEP = 0.1, 8192.0


@dataclass(frozen=True, kw_only=True)
class Llama4Config(MixtureConfig):
    """Sizes of a Llama 4, which reads text alone.

    Attributes:
        interleave_moe_layer_step: The n-th, 2 n-th, ... layer has experts, and the others an MLP.
        chunk_attn_window_size: The number of tokens of a chunk, within which layers attend.
        nope_layer_interval: The n-th, 2 n-th, ... layer attends to all tokens before it, without
            rotary positions. A multiple of `interleave_moe_layer_step`.
        temperature_tuning: Whether scores of these layers grow with the logarithm of the position.
    """

    norm_topk_prob: bool = False
    interleave_moe_layer_step: int
    chunk_attn_window_size: int
    nope_layer_interval: int = 4
    temperature_tuning: bool = False

    qk_norm_has_scales: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        step, interval = self.interleave_moe_layer_step, self.nope_layer_interval
        if self.base_num_decoder_layers % step:
            raise ValueError(
                f"`base_num_decoder_layers` is {self.base_num_decoder_layers}, not a multiple of "
                f"`interleave_moe_layer_step` = {step}. The last layer of every block has experts."
            )
        if self.norm_topk_prob:
            raise ValueError("`norm_topk_prob` is True. A Llama 4 takes shares as they are.")
        if interval % step:
            raise ValueError(
                f"`nope_layer_interval` is {interval}, not a multiple of "
                f"`interleave_moe_layer_step` = {step}. A layer without rotary positions is the "
                "last of its block, which has experts."
            )

    @property
    def layers_per_block(self) -> int:
        """Returns the number of layers of a block."""
        return self.interleave_moe_layer_step

    @property
    def attention_scores(self) -> tuple[Scores, ...]:
        """Returns the scores of both kinds of layers: the same, as chunks are documents."""
        return Scores(), Scores()

    @property
    def chunk(self) -> int:
        """Returns the tokens of a chunk."""
        return self.chunk_attn_window_size

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """Returns 1 for blocks whose last layer has no rotary positions, and 0 for others."""
        last = range(self.layers_per_block, self.base_num_decoder_layers + 1, self.layers_per_block)
        return tuple(int(i % self.nope_layer_interval == 0) for i in last)

    @property
    def frequencies(self) -> Float[np.ndarray, "2 half"]:
        """Returns the rotary angles per position of layers of each kind: 0 of the second."""
        angles = super().frequencies
        return np.stack([angles, np.zeros_like(angles)])

    def after_rotation(
        self,
        q: Float[Array, "b T H C"],
        k: Float[Array, "b T K C"],
        positions: Int[Array, "b T"],
        kind: Any,
    ) -> tuple[Float[Array, "b T H C"], Float[Array, "b T K C"]]:
        """Returns normalized heads of kind 0, and for kind 1 queries that grow with positions."""
        is_rotated = jnp.equal(kind, 0)
        if self.use_qk_norm:
            epsilon = self.normalization_layer_epsilon
            ones = jnp.ones(self.head_dim)
            q, k = (jnp.where(is_rotated, rms_norm(x, ones, epsilon), x) for x in (q, k))
        if self.temperature_tuning:
            floors = jnp.floor((positions.astype(jnp.float32) + 1) / _TOKENS_OF_A_STEP)
            grown = (q * (1 + _GROWTH * jnp.log1p(floors))[..., None, None]).astype(q.dtype)
            q = jnp.where(is_rotated, q, grown)
        return q, k

    @property
    def moe(self) -> MoeSettings:
        """Returns the settings of the experts of a layer."""
        settings = super().moe
        router = replace(settings.router, score_func="sigmoid")
        return replace(settings, router=router, shared_experts=1, scales_inputs=True)
