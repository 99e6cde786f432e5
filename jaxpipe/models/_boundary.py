"""The two ends of a decoder: tokens to embeddings, and the last activations to the loss.

b sequences, T tokens, D embed, V vocab.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from ..sharding import Constrain
from ._abstract import Weight, matrix, scale
from ._chunked_loss import in_chunks
from .layers._common import ACTIVATION, rms_norm, token_losses

_LOGITS = ("activation_batch", "activation_length", "activation_vocab")


def end_weights(embed_dim: int, vocab_size: int, *, tied: bool, dtype: Any) -> dict[str, Any]:
    """`{"embed", "head"}`: the table, the last norm and, unless `tied`, the matrix of logits."""
    D, V = embed_dim, vocab_size
    head = {"norm": scale(D, dtype)}
    if not tied:
        head["logits"] = matrix((D, V), ("embed", "vocab"), D, dtype)
    table = Weight((V, D), ("vocab", "embed"), jax.nn.initializers.normal(D**-0.5), dtype)
    return {"embed": {"table": table}, "head": head}


def embed_tokens(
    table: Float[Array, "V D"], tokens: Int[Array, "b T"], *, constrain: Constrain, dtype: Any
) -> Float[Array, "b T D"]:
    # Whole rows: XLA's partitioner fails on a look-up in a table that is split both ways.
    table = constrain(table.astype(dtype), ("vocab", None))
    return constrain(jnp.take(table, tokens, axis=0), ACTIVATION)


def next_token_loss(
    ends: PyTree,
    x: Float[Array, "b T D"],
    side: PyTree,
    *,
    epsilon: float,
    constrain: Constrain,
    num_chunks: int = 1,
    z_loss_multiplier: float = 0.0,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """This microbatch's share of the batch's cross entropy in nats, and of its accuracy.

    Args:
        ends: `{"head"}`, and `"embed"` beside it if the logits come from the embedding's table.
        x: What the last layer returned.
        side: `targets` and `target_weights` [b, T].
        epsilon: Added to the mean square in the last norm.
        constrain: Shards an activation by its logical axes.
        num_chunks: Compute logits for this share of the tokens at a time; 1 is all at once.
        z_loss_multiplier: If it is not 0, the loss has this times the mean square of the logarithm
            of the sum of exponentials too, by the same shares; and that is the metric `z_loss`.

    References:
        Chowdhery et al., 2022, arXiv 2204.02311, section 5.
    """

    def loss(weights, h, targets, shares):
        logits = jnp.einsum("btd,dv->btv", h, weights, preferred_element_type=jnp.float32)
        losses, hits, of_all = token_losses(constrain(logits, _LOGITS), targets)
        value, sums = jnp.sum(losses * shares), {"accuracy": jnp.sum(hits * shares)}
        if not z_loss_multiplier:
            return value, sums
        z_loss = z_loss_multiplier * jnp.sum(jnp.square(of_all) * shares)
        return value + z_loss, sums | {"z_loss": z_loss}

    h = rms_norm(x, ends["head"]["norm"], epsilon)
    weights = ends["embed"]["table"].T if "embed" in ends else ends["head"]["logits"]
    of_tokens = loss if num_chunks == 1 else in_chunks(loss, num_chunks)
    return of_tokens(weights.astype(x.dtype), h, side["targets"], side["target_weights"])
