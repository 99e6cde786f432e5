"""Functions that models share: normalization, rotary positions, dropout, the loss of a token."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ...autodiff.backward import SUM_OVER_CHANNELS
from ...sharding import local_draws

ACTIVATION = ("activation_batch", "activation_norm_length", "activation_embed")
HEADS = ("activation_batch", "activation_length", "activation_heads", "activation_kv")

Frequencies = Float[np.ndarray, " half"] | Float[Array, " half"]
"""[C / 2] rotary angles per position of each pair of channels, in radians, float32."""
Rope = Callable[[Array, Array, Any], Array]
"""`(x [b, T, H, C], positions [b, T], frequencies [C / 2]) -> [b, T, H, C]`, such as `rope`."""


def rms_norm(
    x: Float[Array, "... D"],
    scale: Float[Array, " D"],
    epsilon: float,
    offset: float = 0.0,
    *,
    is_layer_input: bool = False,
) -> Float[Array, "... D"]:
    """Normalizes by the root mean square (Zhang and Sennrich, 2019, arXiv 1910.07467).

    The factor of a channel is `scale + offset`: Gemma stores by how much it differs from 1. With
    `is_layer_input` every policy saves the mean squares. The input of a layer is no result of a
    product in that layer, so a backward would have to read all of it again to sum its squares.
    """
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x32), axis=-1)
    if is_layer_input:
        mean_square = checkpoint_name(mean_square, SUM_OVER_CHANNELS)
    x32 *= jax.lax.rsqrt(mean_square[..., None] + epsilon)
    factor = scale.astype(jnp.float32)
    return (x32 * (factor + offset if offset else factor)).astype(x.dtype)


def rope_frequencies(
    head_dim: int, max_timescale: float, *, llama31_factor: float = 1.0
) -> Frequencies:
    """Returns the rotary angles per position of each pair of channels, in radians.

    `llama31_factor` stretches wavelengths beyond the 8,192 tokens of Llama 3's training (arXiv
    2407.21783): 8 in Llama 3.1, 32 in 3.2. Su et al., 2021, arXiv 2104.09864.
    """
    frequencies = max_timescale ** -(np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    if llama31_factor == 1.0:
        return frequencies
    low, high, trained_length = 1.0, 4.0, 8192.0
    turns = trained_length * frequencies / (2 * math.pi)
    unscaled_share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (unscaled_share + (1 - unscaled_share) / llama31_factor)


def rope(
    x: Float[Array, "b T H C"], positions: Int[Array, "b T"], frequencies: Frequencies
) -> Float[Array, "b T H C"]:
    """Rotates the two halves of each head's channels against each other, by position."""
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def rope_by_product(
    x: Float[Array, "b T H C"], positions: Int[Array, "b T"], frequencies: Frequencies
) -> Float[Array, "b T H C"]:
    """Computes `rope`, for TPUs: a matrix product exchanges the two halves of the channels."""
    # In the vector unit of a TPU the exchange takes twice as long. Each column of the matrix has a
    # single 1 or -1, so the product is exact.
    tile = np.tile if isinstance(frequencies, np.ndarray) else jnp.tile
    angles = positions[..., None, None].astype(jnp.float32) * tile(frequencies, 2)
    exchange = np.kron([[0, 1], [-1, 0]], np.eye(len(frequencies)))
    exchanged = jnp.matmul(
        x,
        jnp.asarray(exchange, x.dtype),
        precision="highest" if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    turned = x.astype(jnp.float32) * jnp.cos(angles) + exchanged * jnp.sin(angles)
    return turned.astype(x.dtype)


def name_qkv(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Marks queries, keys and values with the names that rematerialization policies use."""
    named = checkpoint_name
    return named(q, "query_proj"), named(k, "key_proj"), named(v, "value_proj")


def dropout(x: Float[Array, "..."], rate: float, key: PRNGKeyArray | tuple) -> Float[Array, "..."]:
    """Zeroes a fraction `rate` of `x` and scales up the rest; with `key` = () it returns `x`."""
    if rate == 0.0 or isinstance(key, tuple):
        return x
    draw = lambda key, shape: jax.random.bernoulli(key, 1.0 - rate, shape)  # noqa: E731
    keep = local_draws(draw, key, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def token_losses(
    logits: Float[Array, "b T V"], targets: Int[Array, "b T"]
) -> tuple[Float[Array, "b T"], Float[Array, "b T"], Float[Array, "b T"]]:
    """Returns each token's cross entropy in nats, whether it is likeliest, and the logsumexp."""
    logits = logits.astype(jnp.float32)
    # A sum over a mask, not a gather: it stays local where the vocabulary is split.
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    picked = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    hits = (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32)
    logsumexps = jax.nn.logsumexp(logits, axis=-1)
    return logsumexps - picked, hits, logsumexps
