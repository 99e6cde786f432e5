"""Runs a model without a pipeline, one microbatch after the other: the reference for engines."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Scalar

from ._model import Model, Sums, combine_losses, fold_in_microbatch, total


def value_and_grad(
    model: Model, weights: dict[str, Any], side: PyTree, keys: PyTree = ()
) -> tuple[tuple[Scalar, Sums], dict[str, Any]]:
    """Returns loss, metrics and gradients of a batch, without a pipeline.

    Args:
        model: The model.
        weights: The three groups of weights; leaves of `weights["stages"]` are [num_stages, ...].
        side: Pytree of [M, ...] leaves, for M microbatches.
        keys: Pytree of [num_stages, ...] leaves, or () without dropout.

    Returns:
        ((loss, metrics), gradients like `weights`). Gradients are summed in the weights' dtype.
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
    """Returns loss and metrics of a batch, without a pipeline and without gradients.

    Args:
        model: The model.
        weights: The three groups of weights; leaves of `weights["stages"]` are [num_stages, ...].
        side: Pytree of [M, ...] leaves, for M microbatches.
        keys: Pytree of [num_stages, ...] leaves, or () without dropout.

    Returns:
        (loss, metrics).
    """
    of_microbatch = _microbatch_loss(model, keys)

    def step(_, microbatch):
        return (), of_microbatch(weights, *microbatch)

    _, (losses, metrics) = jax.lax.scan(step, (), _microbatches(side))
    return jnp.sum(losses), total(metrics)


def _microbatch_loss(model: Model, keys: PyTree) -> Callable:
    """Returns the function `(weights, side of one microbatch, its index) -> (loss, metrics)`."""

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
