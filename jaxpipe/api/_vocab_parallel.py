"""The cross entropy of tokens whose logits are divided over the ranks of a mesh axis."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def vocab_parallel_cross_entropy(
    x: Float[Array, "*tokens D"],
    weights: Float[Array, "D V"],
    targets: Int[Array, "*tokens"],
    axis: str,
) -> Float[Array, "*tokens"]:
    """Computes the cross entropy of tokens, with a part of the vocabulary on each rank.

    Ranks exchange sums and maxima with one value per token. Every rank has the same arguments and
    the same result. It is for `Model.vocab_parallel_loss`.

    Args:
        x: [..., D] what the logits are computed from.
        weights: [D, V] the matrix of logits, whole.
        targets: [...] the tokens that come next, from 0 to V - 1.
        axis: The mesh axis, whose S ranks divide V.

    Returns:
        [...] the negative logarithm of the probability of each target, in float32.

    Raises:
        ValueError: If S does not divide V.

    Example:
        >>> def vocab_parallel_loss(head, x, batch, axis):
        ...     return vocab_parallel_cross_entropy(x, head, batch["targets"], axis).mean()
    """
    vocab_size, num_ranks = weights.shape[1], lax.axis_size(axis)
    if vocab_size % num_ranks:
        raise ValueError(
            f"`weights` has {vocab_size} columns, which the {num_ranks} ranks of {axis!r} do not "
            "divide. Pad the vocabulary, or leave `vocab_parallel` out."
        )
    size = vocab_size // num_ranks
    first = lax.axis_index(axis) * size
    own = lax.dynamic_slice_in_dim(weights, first, size, 1)
    logits = jnp.einsum("...d,dv->...v", x, own, preferred_element_type=jnp.float32)
    maximum = lax.pmax(jnp.max(lax.stop_gradient(logits), axis=-1), axis)
    sums = lax.psum(jnp.sum(jnp.exp(logits - maximum[..., None]), axis=-1), axis)
    is_target = jnp.arange(size) == (targets - first)[..., None]
    picked = lax.psum(jnp.sum(jnp.where(is_target, logits, 0), axis=-1), axis)
    return jnp.log(sums) + maximum - picked
