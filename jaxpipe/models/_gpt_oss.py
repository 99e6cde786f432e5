"""gpt-oss as a llama of experts: a window in every other layer, sinks, biases and a clamped SwiGLU.

All layers have weights of the same shapes, so they are one stack. OpenAI, 2025, arXiv 2508.10925.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from ..kernels import Scores
from ._llama import MixtureConfig
from .layers._moe import MoeSettings
from .layers._routed_experts import clamped_swiglu
from .layers._yarn import yarn_frequencies, yarn_of, yarn_score_scale


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(MixtureConfig):
    """Sizes of a gpt-oss.

    Attributes:
        sliding_window_size: The number of tokens that the first, third, ... layer sees back to,
            itself included. The others see all tokens before.
        rope_factor: YaRN: the factor by which sequences may be longer than the trained length.
        original_max_position_embeddings: YaRN: the trained length, in tokens.
        beta_fast: YaRN: pairs of channels that turn more often within the trained length are not
            changed.
        beta_slow: YaRN: pairs that turn less often within the trained length are stretched in full.
    """

    rope_type: str = "yarn"
    sliding_window_size: int
    rope_factor: float = 40.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    rope_types: ClassVar[tuple[str, ...]] = ("yarn",)
    has_biases_and_sinks: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        yarn_of(self)  # checks its numbers

    @property
    def attention_scores(self) -> tuple[Scores, ...]:
        """Returns the scores of local layers, with a window, and of global ones."""
        scale = self.head_dim**-0.5 * yarn_score_scale(self.rope_factor, 1.0)
        return Scores(window=self.sliding_window_size, scale=scale), Scores(scale=scale)

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """Returns 0 for local layers and 1 for global ones."""
        return tuple(i % 2 for i in range(self.base_num_decoder_layers))

    @property
    def frequencies(self) -> Float[np.ndarray, "2 half"]:
        """Returns the rotary angles per position of local layers, and of global ones: the same."""
        angles = yarn_frequencies(
            self.head_dim, self.rope_max_timescale, yarn_of(self), whole_pairs=False
        )
        return np.stack([angles, angles])

    @property
    def moe(self) -> MoeSettings:
        """Returns the settings of the experts of a layer."""
        return replace(super().moe, has_product_biases=True, gated=clamped_swiglu)
