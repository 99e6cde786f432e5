"""The router: which experts a token goes to, with which shares, and how even their load is.

b sequences, T tokens, E experts, k of them chosen by each token, G groups of experts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ...sharding import sum_over_rows

Scores = Float[Array, "b T E"]
Choice = Int[Array, "b T k"]


class Routing(NamedTuple):
    """What the router decided for one microbatch, or for one device's rows of it.

    Attributes:
        chosen: [b, T, k] experts of each token.
        shares: [b, T, k] what their results are multiplied by, float32.
        load: [E] the share of each expert in all choices of the microbatch's real tokens, float32.
            Its sum is 1.
        weight: The microbatch's weight in the loss: the sum of what devices pass, float32.
        balance: How uneven scores and load are: 1 if all experts are equal, E if one has all.
            Where each device has its own rows it is their part in this: the sum over devices is.
    """

    chosen: Choice
    shares: Float[Array, "b T k"]
    load: Float[Array, " E"]
    weight: Float[Array, ""]
    balance: Float[Array, ""]


def route(
    logits: Scores,
    bias: Float[Array, " E"] | None,
    real: Bool[Array, "b T"],
    weight: Float[Array, ""],
    *,
    score_func: str,
    num_chosen: int,
    normalized: bool,
    scaling_factor: float,
    num_groups: int,
    num_kept_groups: int,
    num_ranking: int = 2,
) -> Routing:
    """Sends every token to its `num_chosen` best experts; none is ever too full.

    Args:
        logits: The router's, in float32.
        bias: Added to the scores for the choice, and for nothing else.
        real: False for padding. It is sent too, but counts nowhere.
        weight: The weight in the loss of the rows that are here.
        score_func: `softmax` over the experts, or `sigmoid` of each.
        num_chosen: k.
        normalized: Whether the shares of a token sum to 1 before they are scaled.
        scaling_factor: Multiplies the shares.
        num_groups: G; 1 for a free choice.
        num_kept_groups: How many groups a token may choose from: those with the largest sums of
            their best experts.
        num_ranking: How many experts are in such a sum: 1 in V2, 2 in V3.

    References:
        V2: DeepSeek-AI, 2024, arXiv 2405.04434, section 2.2; V3: arXiv 2412.19437, section 2.1.2.
    """
    scores = jax.nn.softmax(logits) if score_func == "softmax" else jax.nn.sigmoid(logits)
    ranked = jax.lax.stop_gradient(scores if bias is None else scores + bias)
    if num_groups > 1:
        ranked = _within_best_groups(ranked, num_groups, num_kept_groups, num_ranking)
    _, chosen = jax.lax.top_k(ranked, num_chosen)
    # Sums over masks, not look-ups: XLA's partitioner fails on those inside a pipeline.
    is_chosen = chosen[..., None] == jnp.arange(logits.shape[-1])
    shares = jnp.sum(jnp.where(is_chosen, scores[..., None, :], 0.0), axis=-1)
    if normalized:
        shares /= jnp.sum(shares, axis=-1, keepdims=True)
    choices = _sum_of_real(jnp.sum(is_chosen, axis=-2) / num_chosen, real)
    load, count, weight = _over_rows(choices, jnp.sum(real), weight)
    balance = _balance(scores, load, real, count)
    return Routing(chosen, shares * scaling_factor, load, weight, balance)


def _within_best_groups(scores: Scores, num_groups: int, num_kept: int, num_ranking: int) -> Scores:
    """The scores, and minus infinity outside the groups with the largest sums of best experts."""
    grouped = scores.reshape(*scores.shape[:-1], num_groups, -1)
    of_groups = jnp.sum(jax.lax.top_k(grouped, num_ranking)[0], axis=-1)
    _, best = jax.lax.top_k(of_groups, num_kept)
    is_best = jnp.any(best[..., None] == jnp.arange(num_groups), axis=-2)
    return jnp.where(is_best[..., None], grouped, -jnp.inf).reshape(scores.shape)


def _over_rows(choices: Array, num_real: Array, weight: Array) -> tuple[Array, Array, Array]:
    """Returns the load, the number of tokens and the weight of the whole microbatch.

    One vector is summed over the devices. The number and the weight are the same in all layers, so
    JAX would move a sum of them alone out of the loop over layers. XLA:CPU (jaxlib 0.10) does not
    wait for a loop before it starts a collective that needs nothing from it. Devices then confuse
    this collective with those in the loop, and the program computes garbage or crashes.
    """
    scalars = jnp.stack([num_real.astype(choices.dtype), weight.astype(choices.dtype)])
    sums = sum_over_rows(jnp.concatenate([choices, scalars]))
    count = jnp.maximum(sums[-2], 1)  # exact: a microbatch has less than 2**24 tokens
    return sums[:-2] / count, count, sums[-1]


def _balance(scores: Scores, load: Float[Array, " E"], real: Bool[Array, "b T"], count: Array):
    """Fedus et al., 2021, arXiv 2101.03961, equation 4, over all real tokens of the microbatch.

    The load has no gradient, and in the rest this is linear: the parts of devices add up.
    """
    probabilities = scores / jnp.sum(scores, axis=-1, keepdims=True)
    return load.shape[0] * jnp.sum(load * _sum_of_real(probabilities, real) / count)


def _sum_of_real(x: Scores, real: Bool[Array, "b T"]) -> Float[Array, " E"]:
    """Sums the real tokens that are here."""
    return jnp.sum(jnp.where(real[..., None], x, 0.0), axis=(0, 1))
