"""Chooses the experts of each token and their weights, and measures how even their load is.

b sequences, T tokens, E experts, k of them chosen by each token, G groups of experts.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from ... import _compat
from ...autodiff.backward import SUM_OVER_DEVICES
from ...sharding import match_varying_axes, sum_over_rows

Scores = Float[Array, "b T E"]
ChosenExperts = Int[Array, "b T k"]


class Routing(NamedTuple):
    """The router's decision for one microbatch, or for one device's rows of it, in float32."""

    chosen: ChosenExperts
    shares: Float[Array, "b T k"]  # factors of the results of the chosen experts
    load: Float[Array, " E"]  # the fraction of all choices of the microbatch's real tokens
    weight: Float[Array, ""]  # the microbatch's weight in the loss, summed over the devices
    # How uneven scores and load are: 1 if all experts are equal, E if one has all. Where each
    # device has its own rows, it is the device's part, and the sum over devices is the whole.
    balance: Float[Array, ""]


@dataclass(frozen=True)
class RouterSettings:
    """How a router makes its decision from logits."""

    score_func: str  # `softmax` over the experts, or `sigmoid` of each
    num_chosen: int  # k
    # Whether the shares of a token are normalized to sum to 1 before they are scaled.
    normalized: bool
    scaling_factor: float = 1.0
    num_groups: int = 1  # G; 1 for no groups
    # The number of groups from which a token may choose: those with the largest sums of their best
    # experts.
    num_kept_groups: int = 1
    num_ranking: int = 2  # the number of best experts in these sums: 1 in V2, 2 in V3


def route(
    logits: Scores,
    bias: Float[Array, " E"] | None,
    real: Bool[Array, "b T"],
    weight: Float[Array, ""],
    router: RouterSettings,
) -> Routing:
    """Chooses the `num_chosen` best experts of every token; experts have no capacity limit.

    Padding (`real` is False) is routed too, but does not count in load and balance. V2:
    DeepSeek-AI, 2024, arXiv 2405.04434, section 2.2; V3: arXiv 2412.19437, section 2.1.2.
    """
    scores = jax.nn.softmax(logits) if router.score_func == "softmax" else jax.nn.sigmoid(logits)
    ranked = jax.lax.stop_gradient(scores if bias is None else scores + bias)
    if router.num_groups > 1:
        groups = router.num_groups, router.num_kept_groups, router.num_ranking
        ranked = _within_best_groups(ranked, *groups)
    _, chosen = _best(ranked, router.num_chosen)
    # Sums over masks, not look-ups: XLA's partitioner fails on look-ups inside a pipeline.
    is_chosen = chosen[..., None] == jnp.arange(logits.shape[-1])
    shares = jnp.sum(jnp.where(is_chosen, scores[..., None, :], 0.0), axis=-1)
    if router.normalized:
        shares /= jnp.sum(shares, axis=-1, keepdims=True)
    choices = _sum_of_real(jnp.sum(is_chosen, axis=-2) / router.num_chosen, real)
    load, count, weight = _over_rows(choices, jnp.sum(real), weight)
    balance = _balance(scores, load, real, count)
    return Routing(chosen, shares * router.scaling_factor, load, weight, balance)


def _within_best_groups(scores: Scores, num_groups: int, num_kept: int, num_ranking: int) -> Scores:
    """Returns scores, minus infinity outside the groups whose best experts add up to most."""
    grouped = scores.reshape(*scores.shape[:-1], num_groups, -1)
    group_scores = jnp.sum(_best(grouped, num_ranking)[0], axis=-1)
    _, best = _best(group_scores, num_kept)
    is_best = jnp.any(best[..., None] == jnp.arange(num_groups), axis=-2)
    return jnp.where(is_best[..., None], grouped, -jnp.inf).reshape(scores.shape)


def _best(
    scores: Float[Array, "*dims n"], count: int
) -> tuple[Float[Array, "*dims k"], Int[Array, "*dims k"]]:
    """Returns the largest scores of the last dim in descending order, and their indices."""
    # XLA:GPU's partitioner gathers the rows of all devices for `top_k`; of a sort every device
    # computes its own. It sorts for `top_k` too, unless there are a thousand scores.
    if _compat.platform() != "gpu":
        best, where = jax.lax.top_k(scores, count)
        return best, where
    index = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    negated, where = jax.lax.sort((-scores, index), num_keys=1)
    return -negated[..., :count], where[..., :count]


def _over_rows(
    choices: Float[Array, " E"], num_real: Int[Array, ""], weight: Float[Array, ""]
) -> tuple[Float[Array, " E"], Float[Array, ""], Float[Array, ""]]:
    """Returns the load, the number of tokens and the weight of the whole microbatch."""
    # All are summed over the devices as one vector. JAX would move a separate sum of the number and
    # the weight, the same in all layers, out of the loop over layers. XLA:CPU (jaxlib 0.10) does
    # not wait for a loop before it starts a collective that does not depend on it: devices confuse
    # it with those in the loop, and the program computes garbage or crashes.
    scalars = jnp.stack([num_real.astype(choices.dtype), weight.astype(choices.dtype)])
    sums = sum_over_rows(jnp.concatenate([choices, scalars]))
    # What is saved for a backward comes back from a `shard_map` varying over all of its axes.
    sums = checkpoint_name(match_varying_axes(choices, sums), SUM_OVER_DEVICES)
    count = jnp.maximum(sums[-2], 1)  # exact: a microbatch has less than 2**24 tokens
    return sums[:-2] / count, count, sums[-1]


def _balance(scores: Scores, load: Float[Array, " E"], real: Bool[Array, "b T"], count: Array):
    """Returns the load-balance loss of all real tokens of the microbatch."""
    # It is equation 4 of Fedus et al., 2021, arXiv 2101.03961. The load has no gradient, and the
    # loss is linear in the scores' means: the parts of the devices add up.
    probabilities = scores / jnp.sum(scores, axis=-1, keepdims=True)
    return load.shape[0] * jnp.sum(load * _sum_of_real(probabilities, real) / count)


def _sum_of_real(x: Scores, real: Bool[Array, "b T"]) -> Float[Array, " E"]:
    """Returns the sum of `x` over the real tokens on this device."""
    return jnp.sum(jnp.where(real[..., None], x, 0.0), axis=(0, 1))
