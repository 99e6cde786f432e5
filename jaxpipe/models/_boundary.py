"""Embedding and loss of a decoder: the weights and functions before and after the layers.

The loss is computed in chunks of tokens, so that the logits of a whole microbatch never exist.

b sequences, T tokens, D embed, V vocab, n chunks.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from ..autodiff.staged_model import run_layers
from ..sharding import Constrain, match_varying_axes
from .layers._common import ACTIVATION, rms_norm, token_losses
from .weights._abstract import Weight, matrix, scale

_LOGITS = ("activation_batch", "activation_length", "activation_vocab")


def boundary_weights(
    embed_dim: int, vocab_size: int, *, tied: bool, dtype: Any, norm_offset: float = 0.0
) -> dict[str, Any]:
    """Returns the abstract weights `{"embed": {"table"}, "head": {"norm", "logits"}}`."""
    D, V = embed_dim, vocab_size
    head = {"norm": scale(D, dtype, norm_offset)}
    if not tied:
        head["logits"] = matrix((D, V), ("embed", "vocab"), D, dtype)
    table = Weight((V, D), ("vocab", "embed"), jax.nn.initializers.normal(D**-0.5), dtype)
    return {"embed": {"table": table}, "head": head}


def embed_tokens(
    table: Float[Array, "V D"], tokens: Int[Array, "b T"], *, constrain: Constrain, dtype: Any
) -> Float[Array, "b T D"]:
    """Returns the embeddings of tokens in `dtype`."""
    # Rows stay whole: XLA's partitioner fails on a look-up in a table sharded in both dims.
    table = constrain(table.astype(dtype), ("vocab", None))
    count = constrain.num_shards("vocab")
    if count == 1:
        return constrain(jnp.take(table, tokens, axis=0), ACTIVATION)
    # Every shard looks up its own: left to XLA, a look-up of sharded tokens in a sharded table ends
    # the process where `stage` is manual (jax 0.12, `partition_group_list`).
    shards = constrain(table.reshape(count, -1, table.shape[1]), ("vocab", None, None))
    tokens = jnp.where(tokens < 0, tokens + table.shape[0], tokens)
    ids = tokens - (jnp.arange(count) * shards.shape[1])[:, None, None]
    own = {"mode": "fill", "fill_value": 0, "wrap_negative_indices": False}
    rows = jax.vmap(lambda shard, ids: shard.at[ids].get(**own))(shards, ids)
    x = lax.reduce_sum(constrain(rows, ("vocab", *ACTIVATION)), axes=(0,))
    # As `jnp.take`: NaN for tokens that the table does not have.
    known = (tokens >= 0) & (tokens < table.shape[0])
    return constrain(jnp.where(known[..., None], x, jnp.nan), ACTIVATION)


def next_token_logits(
    boundary: PyTree,
    x: Float[Array, "b T D"],
    *,
    epsilon: float,
    constrain: Constrain,
    norm_offset: float = 0.0,
) -> Float[Array, "b T V"]:
    """Returns the float32 logits of the token that follows each one.

    Args:
        boundary: `{"head"}`, and "embed" if the logits are computed with its table.
        x: The output of the last layer.
        epsilon: Added to the mean square in the last norm.
        constrain: Shards an activation by its logical axes.
        norm_offset: A number that is added to the scales of the last norm.

    Returns:
        The logits, whose softmax `next_token_loss` takes.
    """
    h, weights = _factors_of_logits(boundary, x, epsilon, norm_offset)
    return _logits(h, weights.astype(x.dtype), constrain)


def _factors_of_logits(
    boundary: PyTree, x: Float[Array, "b T D"], epsilon: float, norm_offset: float
) -> tuple[Float[Array, "b T D"], Float[Array, "D V"]]:
    h = rms_norm(x, boundary["head"]["norm"], epsilon, norm_offset)
    weights = boundary["embed"]["table"].T if "embed" in boundary else boundary["head"]["logits"]
    return h, weights


def _logits(
    h: Float[Array, "b T D"], weights: Float[Array, "D V"], constrain: Constrain
) -> Float[Array, "b T V"]:
    logits = jnp.einsum("btd,dv->btv", h, weights, preferred_element_type=jnp.float32)
    return constrain(logits, _LOGITS)


def next_token_loss(
    boundary: PyTree,
    x: Float[Array, "b T D"],
    batch_inputs: PyTree,
    *,
    epsilon: float,
    constrain: Constrain,
    num_chunks: int = 1,
    z_loss_multiplier: float = 0.0,
    norm_offset: float = 0.0,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Returns this microbatch's share of the batch's cross entropy in nats, and of its metrics.

    All results are sums over tokens weighted by `target_weights`. `boundary` has "embed" if the
    logits are computed with its table. With `z_loss_multiplier` the loss also contains that factor
    times the mean of the squared logsumexp (Chowdhery et al., 2022, arXiv 2204.02311, section 5).
    """

    def loss(weights, h, targets, shares):
        losses, hits, logsumexps = token_losses(_logits(h, weights, constrain), targets)
        value, metrics = jnp.sum(losses * shares), {"accuracy": jnp.sum(hits * shares)}
        if not z_loss_multiplier:
            return value, metrics
        z_loss = z_loss_multiplier * jnp.sum(jnp.square(logsumexps) * shares)
        return value + z_loss, metrics | {"z_loss": z_loss}

    h, weights = _factors_of_logits(boundary, x, epsilon, norm_offset)
    token_loss = loss if num_chunks == 1 else _in_chunks(loss, num_chunks)
    return token_loss(
        weights.astype(x.dtype), h, batch_inputs["targets"], batch_inputs["target_weights"]
    )


def loss_after_layers(
    layer: Callable, token_loss: Callable, kinds: tuple[int, ...] = ()
) -> Callable:
    """Returns `(boundary, x, batch_inputs) -> (loss, metrics)` with the layers after the pipeline.

    These are `boundary["head"]["layers"]`. Their load-balance losses are part of the loss. If
    layers are of several kinds, `layer` is given the kind with its key.
    """

    def loss(boundary: PyTree, x: Float[Array, "b T D"], batch_inputs: PyTree):
        if "layers" not in boundary["head"]:
            return token_loss(boundary, x, batch_inputs)
        layers = boundary["head"]["layers"]
        count = len(jax.tree.leaves(layers)[0])
        keys = ((), np.array(kinds[-count:], np.int32)) if kinds else ()
        x, aux = run_layers(layer, layers, x, batch_inputs, keys)
        loss, metrics = token_loss(boundary, x, batch_inputs)
        if not aux:
            return loss, metrics
        metrics["load_balance_loss_after"] = aux["load_balance_loss"]
        return loss + aux["loss"], metrics

    return loss


Loss = Callable[[Array, Array, Array, Array], tuple[Array, dict[str, Float[Array, ""]]]]
"""`(weights [D, V], h [b, T, D], targets [b, T], shares [b, T]) -> (loss, metrics)`. All results
are sums over tokens, and only the loss is differentiable."""


def _in_chunks(loss: Loss, num_chunks: int) -> Loss:
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
