"""A small residual MLP with every feature that a pipeline must support, for tests and examples.

b sequences, T tokens, D embed, V vocab, L layers of a stage.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .layers._common import dropout, rms_norm, token_losses
from .weights._abstract import Weight


def mlp_weights(
    embed_dim: int, mlp_dim: int, vocab_size: int, *, tied: bool = False
) -> dict[str, Any]:
    """Returns the abstract weights of the MLP.

    Args:
        embed_dim: D, the channels between layers.
        mlp_dim: The width of the hidden layer.
        vocab_size: V, the rows of the embedding's table.
        tied: Whether the logits are computed with the embedding's table.

    Returns:
        `{"embed", "layer", "head"}`: trees of `Weight`. "layer" is one layer, unstacked.

    Example:
        >>> from jaxpipe.models import num_parameters
        >>> num_parameters(mlp_weights(embed_dim=8, mlp_dim=16, vocab_size=32))
        776
    """
    normal = jax.nn.initializers.normal(0.3)
    head = Weight((embed_dim, vocab_size), ("embed", "vocab"), normal)
    return {
        "embed": {"table": Weight((vocab_size, embed_dim), ("vocab", "embed"), normal)},
        "layer": {
            "scale": Weight((embed_dim,), ("norm",), jax.nn.initializers.ones),
            "up": Weight((embed_dim, mlp_dim), ("embed", "mlp"), normal),
            "down": Weight((mlp_dim, embed_dim), ("mlp", "embed"), normal),
        },
        "head": {} if tied else {"logits": head},
    }


def mlp(*, dropout_rate: float = 0.0) -> tuple[Callable, Callable, Callable]:
    """Returns the functions `(embed, stage, loss)` of the MLP.

    Args:
        dropout_rate: The fraction of each residual branch that is dropped.

    Returns:
        `embed(weights, batch_inputs) -> x`, `stage(weights, x, batch_inputs, keys) -> (y, aux)`
        and `loss(boundary, x, batch_inputs) -> (loss, metrics)`. x and y are dicts
        with the entries "x" and "skip", [b, T, D] each. `aux` has two scalars.
    """

    def embed(weights: PyTree, batch_inputs: PyTree) -> PyTree:
        x = jnp.take(weights["table"], batch_inputs["tokens"], axis=0)
        return {"x": x, "skip": 0.5 * x}

    def stage(weights: PyTree, x: PyTree, batch_inputs: PyTree, rng: PyTree) -> tuple[PyTree, dict]:
        def layer(x, layer):
            w, key = layer
            h = rms_norm(x["x"], w["scale"], 1e-6) + x["skip"]
            h = jnp.tanh(h @ w["up"]) * jnp.cos(batch_inputs["positions"])[..., None].astype(
                h.dtype
            )
            y = dropout(h @ w["down"], dropout_rate, key)
            aux = {"loss": 1e-3 * jnp.mean(jnp.square(h)), "hidden": jnp.mean(jnp.abs(h))}
            return {"x": x["x"] + y, "skip": x["skip"]}, aux

        x, aux = jax.lax.scan(layer, x, (weights, rng))
        return x, jax.tree.map(jnp.sum, aux)

    def loss(boundary: PyTree, x: PyTree, batch_inputs: PyTree) -> tuple[Float[Array, ""], dict]:
        tied = "embed" in boundary
        matrix = boundary["embed"]["table"].T if tied else boundary["head"]["logits"]
        losses, hits, _ = token_losses(x["x"] @ matrix, batch_inputs["targets"])
        share = batch_inputs["target_weights"]
        return jnp.sum(losses * share), {"accuracy": jnp.sum(hits * share)}

    return embed, stage, loss
