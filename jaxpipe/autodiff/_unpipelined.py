"""The reference: the same model on one device, one microbatch after the other."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree, Scalar

from ._model import Model, Sums, fold, joined, total


def value_and_grad(
    model: Model, weights: dict[str, Any], side: PyTree, keys: PyTree = ()
) -> tuple[tuple[Scalar, Sums], dict[str, Any]]:
    """Loss, metrics and gradients of a batch, without a pipeline.

    Args:
        model: The model.
        weights: The three groups; leaves of `weights["stages"]` are [num_stages, ...].
        side: [M, ...] leaves.
        keys: [num_stages, ...] leaves, or () without dropout.

    Returns:
        ((loss, metrics), gradients like `weights`). Gradients add up in the weights' dtype.
    """

    def microbatch_loss(weights, side_m, index):
        def step(x, stage):
            return model.stage(stage[0], x, side_m, fold(stage[1], index))

        x = model.embed(weights["embed"], side_m)
        y, of_stages = jax.lax.scan(step, x, (weights["stages"], keys))
        loss, of_loss = model.loss(model.ends(weights), y, side_m)
        return joined(loss, of_loss, total(of_stages))

    def step(grads, microbatch):
        value, new = jax.value_and_grad(microbatch_loss, has_aux=True)(weights, *microbatch)
        return jax.tree.map(jnp.add, grads, new), value

    num_microbatches = jax.tree.leaves(side)[0].shape[0]
    zeros = jax.tree.map(jnp.zeros_like, weights)
    grads, (losses, metrics) = jax.lax.scan(step, zeros, (side, jnp.arange(num_microbatches)))
    return (jnp.sum(losses), total(metrics)), grads
