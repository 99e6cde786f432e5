"""Gemma 3 as a llama: layers whose attention sees a window, with one that sees all in each pattern.

All layers have weights of the same shapes, so they are one stack. What else is different from a
llama: four norms in a layer, whose scales are stored as what they add to 1, GeGLU, and embeddings
multiplied by sqrt(D). Gemma Team, 2025, arXiv 2503.19786.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from ..kernels import Scores
from ._llama import LlamaConfig
from .layers._common import rope_frequencies
from .layers._gated_mlp import GatedMlp


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(LlamaConfig):
    """Sizes of a Gemma 3, which reads text alone.

    Attributes:
        query_pre_attn_scalar: Scores are divided by the square root of this number.
        sliding_window_size: The number of tokens that a local layer sees back to, itself included.
        sliding_window_pattern: The n-th, 2 n-th, ... layer is global: it sees all tokens before it.
        local_rope_max_timescale: The base of the rotary angles of local layers; that of global ones
            is `rope_max_timescale`.
        rope_linear_scaling_factor: The angles of global layers are divided by it.
    """

    query_pre_attn_scalar: int
    sliding_window_size: int
    sliding_window_pattern: int = 6
    local_rope_max_timescale: float = 10_000.0
    rope_linear_scaling_factor: float = 1.0

    norm_offset: ClassVar[float] = 1.0
    has_post_norms: ClassVar[bool] = True
    scales_embedding: ClassVar[bool] = True

    @property
    def mlp(self) -> GatedMlp:
        """Returns the MLP of a layer, GeGLU."""
        return GatedMlp(self.base_emb_dim, self.base_mlp_dim, "gelu")

    @property
    def attention_scores(self) -> tuple[Scores, ...]:
        """Returns the attention of local layers, and that of global ones."""
        scale = self.query_pre_attn_scalar**-0.5
        return Scores(window=self.sliding_window_size, scale=scale), Scores(scale=scale)

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """Returns 0 for local layers and 1 for global ones."""
        layers = range(1, self.base_num_decoder_layers + 1)
        return tuple(int(i % self.sliding_window_pattern == 0) for i in layers)

    @property
    def frequencies(self) -> Float[np.ndarray, "2 half"]:
        """Returns the rotary angles per position of local layers, and of global ones."""
        local = rope_frequencies(self.head_dim, self.local_rope_max_timescale)
        return np.stack([local, super().frequencies / self.rope_linear_scaling_factor])
