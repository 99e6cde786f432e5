"""Pieces that models share: normalization, rotary positions, dropout, the loss of a token."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from ...sharding import Constrain, local_rows
from .._abstract import Weight, matrix
from ._projection import Projection

ACTIVATION = ("activation_batch", "activation_length", "activation_embed")
HEADS = ("activation_batch", "activation_length", "activation_heads", "activation_kv")
_HIDDEN = ("activation_batch", "activation_length", "activation_mlp")


def rms_norm(
    x: Float[Array, "... D"], scale: Float[Array, " D"], epsilon: float
) -> Float[Array, "... D"]:
    """RMSNorm in float32: Zhang and Sennrich, 2019, arXiv 1910.07467."""
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (wide * scale.astype(jnp.float32)).astype(x.dtype)


def rope_frequencies(
    head_dim: int, max_timescale: float, *, llama31_factor: float = 1.0
) -> Float[np.ndarray, " half"]:
    """Angles per position of each pair of channels, in radians.

    Args:
        head_dim: Channels of a head; half as many angles come back.
        max_timescale: The base, 10,000 in the paper.
        llama31_factor: Stretch wavelengths beyond the 8,192 tokens of Llama 3's training by this,
            which is 8 in Llama 3.1 and 32 in 3.2.

    References:
        Su et al., 2021, arXiv 2104.09864; Llama 3.1's scaling: arXiv 2407.21783.
    """
    frequencies = max_timescale ** -(np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    if llama31_factor == 1.0:
        return frequencies
    low, high, trained_length = 1.0, 4.0, 8192.0
    turns = trained_length * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / llama31_factor)


def rope(
    x: Float[Array, "b T H C"],
    positions: Int[Array, "b T"],
    frequencies: Float[np.ndarray, " half"],
) -> Float[Array, "b T H C"]:
    """Turns the first and second half of each head's channels against each other, by position."""
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def name_qkv(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """What attention takes, by the names of rematerialisation policies."""
    named = checkpoint_name
    return named(q, "query_proj"), named(k, "key_proj"), named(v, "value_proj")


def swiglu(
    w: PyTree, x: Float[Array, "b T D"], constrain: Constrain, project: Projection
) -> Float[Array, "b T D"]:
    """The gated MLP of `w["gate"]`, `w["up"]` and `w["down"]`: Shazeer, 2020, arXiv 2002.05202."""
    gate, up = (constrain(project(x, w[name]), _HIDDEN) for name in ("gate", "up"))
    gate, up = checkpoint_name(gate, "mlpwi_0"), checkpoint_name(up, "mlpwi_1")
    return checkpoint_name(project(jax.nn.silu(gate) * up, w["down"]), "mlpwo")


def stack(layer: Callable, *, scan: bool = True) -> Callable:
    """Layers with equal weights, one after the other, and the sums of what they sum up.

    Args:
        layer: `(weights, x, side, key) -> (y, sums)`.
        scan: Whether they are a loop of the program, or written out.

    Returns:
        The same for weights and keys with [L, ...] leaves; keys may be ().
    """

    def run(weights: PyTree, x: Float[Array, "b T D"], side: PyTree, keys: PyTree):
        def step(x, of_layer):
            w, key = of_layer
            return layer(w, x, side, key)

        x, sums = jax.lax.scan(step, x, (weights, keys), unroll=not scan)
        return x, jax.tree.map(jnp.sum, sums)

    return run


def swiglu_weights(D: int, F: int, *, branches: int, dtype: Any) -> dict[str, Weight]:
    """Of a gated MLP of width `F`. What it adds starts smaller where there are more `branches`."""
    return {
        "gate": matrix((D, F), ("embed", "mlp"), D, dtype),
        "up": matrix((D, F), ("embed", "mlp"), D, dtype),
        "down": matrix((F, D), ("mlp", "embed"), F * branches, dtype),
    }


def dropout(x: Float[Array, "..."], rate: float, key: PRNGKeyArray | tuple) -> Float[Array, "..."]:
    """Zeroes a share `rate` of `x` and scales up the rest; with `key` = () it does nothing."""
    if rate == 0.0 or isinstance(key, tuple):
        return x
    keep = local_rows(lambda shape: jax.random.bernoulli(key, 1.0 - rate, shape), x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def token_losses(
    logits: Float[Array, "b T V"], targets: Int[Array, "b T"]
) -> tuple[Float[Array, "b T"], Float[Array, "b T"], Float[Array, "b T"]]:
    """Of every token: cross entropy in nats; 1 where the likeliest token is the target, else 0; and
    the logarithm of the sum of exponentials."""
    logits = logits.astype(jnp.float32)
    # A sum over a mask, not a gather: it stays local where the vocabulary is split.
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    picked = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    hits = (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32)
    of_all = jax.nn.logsumexp(logits, axis=-1)
    return of_all - picked, hits, of_all
