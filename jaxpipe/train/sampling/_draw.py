"""Chooses the next token of every row from its logits.

b rows, V vocab.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

Choose = Callable[[Float[Array, "b V"], Key[Array, " b"]], Int[Array, " b"]]
"""`(logits, keys) -> tokens`. A logit of minus infinity is of a token that is never chosen."""


def choice(temperature: float, top_p: float) -> Choose:
    """Returns the rule of a temperature, 0 for the likeliest token, and of a share `top_p`."""
    return partial(draw, temperature=temperature, top_p=top_p) if temperature else likeliest


def likeliest(logits: Float[Array, "b V"], keys: Key[Array, " b"]) -> Int[Array, " b"]:
    """Returns the token with the largest logit, the first of several."""
    del keys
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def draw(
    logits: Float[Array, "b V"], keys: Key[Array, " b"], *, temperature: float, top_p: float
) -> Int[Array, " b"]:
    """Draws a token by the probabilities of the logits, divided by the temperature."""
    # The largest becomes 0: without that a small temperature makes infinities of several.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    if top_p < 1:
        logits = nucleus(logits, top_p)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def nucleus(logits: Float[Array, "b V"], top_p: float) -> Float[Array, "b V"]:
    """Keeps the fewest of the likeliest tokens whose probabilities add up to at least `top_p`.

    Holtzman et al., 2019, arXiv 1904.09751. The logits of all others become minus infinity.
    """
    order = jnp.argsort(logits, axis=-1, descending=True)
    ordered = jnp.take_along_axis(logits, order, axis=-1)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    likelier = jnp.cumsum(probabilities, axis=-1) - probabilities
    # The likeliest has nothing before it, whatever the sums are rounded to.
    is_kept = (likelier < top_p).at[:, 0].set(True)
    kept = jnp.where(is_kept, ordered, -jnp.inf)
    return jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)
