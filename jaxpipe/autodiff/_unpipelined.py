"""The reference: the same model on one device, one microbatch after the other."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Scalar

from ._model import Model, Sums, combine_losses, fold_in_microbatch, total


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

    of_microbatch = jax.value_and_grad(_microbatch_loss(model, keys), has_aux=True)

    def step(grads, microbatch):
        value, new = of_microbatch(weights, *microbatch)
        return jax.tree.map(jnp.add, grads, new), value

    zeros = jax.tree.map(jnp.zeros_like, weights)
    grads, (losses, metrics) = jax.lax.scan(step, zeros, _microbatches(side))
    return (jnp.sum(losses), total(metrics)), grads


def value(
    model: Model, weights: dict[str, Any], side: PyTree, keys: PyTree = ()
) -> tuple[Scalar, Sums]:
    """(loss, metrics) alone; the arguments are those of `value_and_grad`."""
    of_microbatch = _microbatch_loss(model, keys)

    def step(_, microbatch):
        return (), of_microbatch(weights, *microbatch)

    _, (losses, metrics) = jax.lax.scan(step, (), _microbatches(side))
    return jnp.sum(losses), total(metrics)


def _microbatch_loss(model: Model, keys: PyTree) -> Callable:
    """`(weights, side of one microbatch, its index) -> (loss, metrics)`."""

    def loss(weights, side_m, index):
        def step(x, stage):
            return model.stage(stage[0], x, side_m, fold_in_microbatch(stage[1], index))

        x = model.embed(weights["embed"], side_m)
        y, of_stages = jax.lax.scan(step, x, (weights["stages"], keys))
        loss, of_loss = model.loss(model.ends(weights), y, side_m)
        return combine_losses(loss, of_loss, total(of_stages))

    return loss


def _microbatches(side: PyTree) -> tuple[PyTree, Array]:
    return side, jnp.arange(jax.tree.leaves(side)[0].shape[0])
