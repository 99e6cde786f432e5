"""Computes the loss in chunks of tokens, so that the logits of a whole microbatch never exist.

b sequences, T tokens, D embed, V vocab, n chunks.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..sharding import match_varying_axes

Loss = Callable[[Array, Array, Array, Array], tuple[Array, dict[str, Float[Array, ""]]]]
"""`(weights [D, V], h [b, T, D], targets [b, T], shares [b, T]) -> (loss, metrics)`. All results
are sums over tokens, and only the loss is differentiable."""


def in_chunks(loss: Loss, num_chunks: int) -> Loss:
    """Returns `loss`, computed for T / n tokens of every sequence at a time."""
    # The forward pass computes the gradients together with the loss, so logits are computed once.
    # The gradients of the weights are accumulated in float32.

    @jax.custom_vjp
    def loss_in_chunks(weights, h, targets, shares):
        chunks = _split(num_chunks, h, targets, shares)
        return jax.tree.map(jnp.sum, jax.lax.map(lambda chunk: loss(weights, *chunk), chunks))

    def forward(weights, h, targets, shares):
        def step(dweights, chunk):
            loss_and_grads = jax.value_and_grad(loss, argnums=(0, 1, 3), has_aux=True)
            loss_and_metrics, (dw, dh, dshares) = loss_and_grads(weights, *chunk)
            return dweights + dw.astype(jnp.float32), (loss_and_metrics, (dh, dshares))

        zeros = jnp.zeros_like(weights, dtype=jnp.float32)
        chunks = _split(num_chunks, h, targets, shares)
        dweights, (loss_and_metrics, chunk_grads) = jax.lax.scan(step, zeros, chunks)
        return jax.tree.map(jnp.sum, loss_and_metrics), (dweights, *map(_join, chunk_grads))

    def backward(gradients, cotangents):
        dweights, dh, dshares = gradients
        dloss, _ = cotangents
        dweights = (dweights * dloss).astype(dh.dtype)
        return dweights, dh * dloss.astype(dh.dtype), None, dshares * dloss

    loss_in_chunks.defvjp(forward, backward)

    def checked(
        weights: Float[Array, "D V"],
        h: Float[Array, "b T D"],
        targets: Int[Array, "b T"],
        shares: Float[Array, "b T"],
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        if h.shape[1] % num_chunks:
            raise ValueError(
                f"`num_vocab_tiling` is {num_chunks}, which does not divide the {h.shape[1]} "
                "tokens of a sequence. Give a divisor of `max_target_length`."
            )
        # Devices that share weights have different gradients of them.
        return loss_in_chunks(match_varying_axes(h, weights), h, targets, shares)

    return checked


def _split(n: int, *arrays: Array) -> tuple[Array, ...]:
    """Splits [b, T, ...] arrays into chunks [n, b, T / n, ...] of every n-th token."""

    def split(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, n, *x.shape[2:]), 2, 0)

    return tuple(map(split, arrays))


def _join(x: Float[Array, "n b t ..."]) -> Float[Array, "b T ..."]:
    """Merges the chunks that `_split` has made."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(x.shape[0], -1, *x.shape[3:])
