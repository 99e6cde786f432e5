"""YaRN: rotary positions for sequences longer than those of the training.

Pairs of channels that turn often within the trained length distinguish neighbouring tokens and are
not changed. Pairs that turn less than once are slowed down, so that no new angle occurs. Between
them the slowdown increases linearly. Peng et al., 2023, arXiv 2309.00071, with the constants of
DeepSeek-V2, arXiv 2405.04434, which begins and ends the increase at whole pairs, or of gpt-oss.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._common import Frequencies, rope_frequencies


@dataclass(frozen=True)
class Yarn:
    """The numbers of YaRN for a model."""

    factor: float  # the factor by which sequences may be longer than `trained_length`
    trained_length: int  # the length of the sequences of the training, in tokens
    beta_fast: float  # pairs that turn more often than this within `trained_length` are not changed
    beta_slow: float  # pairs that turn less often than this are slowed down by `factor`
    mscale: float  # how strongly attention scores grow with the logarithm of `factor`

    def __post_init__(self):
        # Pairs would not be slowed down in their order.
        if self.factor < 1:
            raise ValueError(
                f"`rope_factor` is {self.factor:g}. YaRN makes sequences longer: give 1 or more."
            )
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"`beta_fast` is {self.beta_fast:g} and `beta_slow` {self.beta_slow:g}. Pairs that "
                "turn more often than `beta_fast` stay as they are: give at least `beta_slow`."
            )


def yarn_of(sizes: Any) -> Yarn:
    """Returns the numbers of YaRN that the sizes of a model have."""
    return Yarn(
        sizes.rope_factor,
        sizes.original_max_position_embeddings,
        sizes.beta_fast,
        sizes.beta_slow,
        getattr(sizes, "mscale", 1.0),
    )


def yarn_frequencies(
    head_dim: int, max_timescale: float, yarn: Yarn, *, whole_pairs: bool = True
) -> Frequencies:
    """Returns the rotary angles per position of each pair of channels, in radians."""

    def pair_that_turns(times: float) -> float:
        wavelength = yarn.trained_length / (times * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(max_timescale))

    first, last = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    slowed = np.clip((pairs - first) / max(last - first, 1e-3), 0.0, 1.0)
    return rope_frequencies(head_dim, max_timescale) * (1 - slowed + slowed / yarn.factor)


def yarn_score_scale(factor: float, mscale: float) -> float:
    """Returns the factor of attention scores that YaRN adds to the usual `1 / sqrt(channels)`."""
    return (0.1 * mscale * math.log(max(factor, 1.0)) + 1.0) ** 2
