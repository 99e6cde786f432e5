"""Computes the loss of a microbatch on all ranks of an axis, each for a slice of the vocabulary.

This balances the work of the ranks: otherwise the last stage's rank would compute all logits. The
gradients are written out by hand. Besides the sum of the gradient with respect to x, ranks exchange
only sums, maxima and minima with one value per token.

b sequences, T tokens, D embed, V vocab, S ranks.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from ..sharding import match_varying_axes
from .layers._common import rms_norm

VocabParallelLoss = Callable[[PyTree, Array, PyTree, str], tuple[Any, Any]]


def vocab_parallel_next_token_loss(
    epsilon: float, z_loss_multiplier: float = 0.0, *, norm_offset: float = 0.0
) -> VocabParallelLoss:
    """Returns a function that computes the loss and its gradients inside a mesh axis.

    Args:
        epsilon: Added to the mean square in the last norm.
        z_loss_multiplier: The factor of the z-loss, see `next_token_loss`. 0 omits it.
        norm_offset: A number that is added to the scales of the last norm.

    Returns:
        A function `(boundary, x, batch_inputs, axis) -> ((loss, metrics), (gradients of boundary,
        gradient of x))`. Its first three arguments are those of `next_token_loss` and are the same
        on all ranks, and so is the gradient of x. Each rank returns its part of the other results:
        their sums over `axis` are the whole. The function raises a `ValueError` if S does not
        divide V.
    """

    def loss(boundary: PyTree, x: Float[Array, "b T D"], batch_inputs: PyTree, axis: str):
        rank = lax.axis_index(axis)
        # Each rank differentiates by its own copy of x: the gradient of a shared x would be summed.
        x = match_varying_axes(boundary, x)
        h, pull_norm = jax.vjp(
            lambda x, scale: rms_norm(x, scale, epsilon, norm_offset), x, boundary["head"]["norm"]
        )
        tied = "embed" in boundary
        vocab_weights = boundary["embed"]["table"] if tied else boundary["head"]["logits"]
        dim = 0 if tied else 1
        size = _slice_of(vocab_weights.shape[dim], lax.axis_size(axis))
        own_slice = lax.dynamic_slice_in_dim(vocab_weights, rank * size, size, dim).astype(x.dtype)
        weights = own_slice.T if tied else own_slice
        targets = batch_inputs["targets"] - rank * size

        shares = batch_inputs["target_weights"]
        losses, hits, logsumexps, probabilities = _losses(h, weights, targets, axis)
        z_losses = z_loss_multiplier * jnp.square(logsumexps)
        # The derivative of logsumexp**2 is 2 * logsumexp times the probabilities.
        slope = 1 + 2 * z_loss_multiplier * logsumexps
        is_target = jnp.arange(size) == targets[..., None]
        dlogits = probabilities * slope[..., None] - is_target.astype(jnp.float32)
        dlogits *= shares[..., None]
        dlogits = dlogits.astype(x.dtype)
        dweights = jnp.einsum("btd,btv->dv", h, dlogits, preferred_element_type=jnp.float32)
        dh = jnp.einsum("btv,dv->btd", dlogits, weights, preferred_element_type=jnp.float32)
        dx, dnorm = pull_norm(match_varying_axes(h, lax.psum(dh, axis).astype(h.dtype)))
        zeros = jnp.zeros(vocab_weights.shape, jnp.float32)
        dvocab = lax.dynamic_update_slice_in_dim(
            zeros, dweights.T if tied else dweights, rank * size, dim
        )

        def once(value: jax.Array) -> jax.Array:
            """Returns `value` on the first rank and 0 on others, so that a sum counts it once."""
            return jnp.where(rank == 0, value, jnp.zeros_like(value))

        boundary_grads = {"head": {"norm": once(dnorm)}}
        boundary_grads |= {"embed": {"table": dvocab}} if tied else {}
        boundary_grads["head"] |= {} if tied else {"logits": dvocab}
        value = once(jnp.sum((losses + z_losses) * shares))
        metrics = {"accuracy": once(jnp.sum(hits * shares))}
        metrics |= {"z_loss": once(jnp.sum(z_losses * shares))} if z_loss_multiplier else {}
        return (value, metrics), (boundary_grads, dx)

    return loss


def _slice_of(vocab_size: int, num_ranks: int) -> int:
    if vocab_size % num_ranks:
        raise ValueError(
            f"`vocab_size` is {vocab_size}, which {num_ranks} ranks cannot share evenly. Change "
            "one of them, or leave the head to the last stage's rank."
        )
    return vocab_size // num_ranks


def _losses(
    h: Float[Array, "b T D"], weights: Float[Array, "D v"], targets: Int[Array, "b T"], axis: str
) -> tuple[Float[Array, "b T"], Float[Array, "b T"], Float[Array, "b T"], Float[Array, "b T v"]]:
    """Returns the results of `token_losses`, and the probabilities of this rank's v logits.

    `targets` are counted from this rank's first logit.
    """
    logits = jnp.einsum("btd,dv->btv", h, weights, preferred_element_type=jnp.float32)
    highest = jnp.max(logits, axis=-1)
    maximum = lax.pmax(highest, axis)
    exponentials = jnp.exp(logits - maximum[..., None])
    sums = lax.psum(jnp.sum(exponentials, axis=-1), axis)
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    picked = lax.psum(jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1), axis)
    # Among equal logits the first token is the likeliest, as in `argmax`.
    first = jnp.argmax(logits, axis=-1) - targets
    far = jnp.iinfo(first.dtype).max
    likeliest = lax.pmin(jnp.where(highest == maximum, first, far), axis)
    hits = (likeliest == 0).astype(jnp.float32)
    logsumexps = jnp.log(sums) + maximum
    return logsumexps - picked, hits, logsumexps, exponentials / sums[..., None]
