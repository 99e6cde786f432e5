"""Runs a model without a pipeline, one microbatch after the other: the reference for engines."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Scalar

from ..ir.transforms import add_gradients
from .staged_model import (
    Aux,
    StagedModel,
    accum_dtype,
    combine_losses,
    fold_in_microbatch,
    sum_scalars,
)


def value_and_grad(
    model: StagedModel, weights: dict[str, Any], batch_inputs: PyTree, keys: PyTree = ()
) -> tuple[tuple[Scalar, Aux], dict[str, Any]]:
    """Returns loss, metrics and gradients of a batch, without a pipeline.

    Example:
        >>> model = StagedModel(
        ...     embed=lambda w, batch: batch["x"] * w,
        ...     stage=lambda w, x, batch, rng: x + w,
        ...     loss=lambda boundary, y, batch: (jnp.sum(y * boundary["head"]), {}),
        ... )
        >>> weights = {"embed": jnp.ones(()), "stages": jnp.ones(3), "head": jnp.ones(())}
        >>> (loss, _), grads = value_and_grad(model, weights, {"x": jnp.ones((2, 4))})
        >>> float(loss), float(grads["head"]), grads["stages"].tolist()
        (32.0, 32.0, [8.0, 8.0, 8.0])
    """
    # Otherwise XLA may keep logits until layers have run backwards.
    model = replace(model, loss=_gradients_at_once(model.loss))
    loss_and_grads = jax.value_and_grad(_microbatch_loss(model, keys), has_aux=True)

    microbatches = _microbatches(batch_inputs)
    if len(microbatches[1]) == 1:  # nothing is added up
        value, grads = loss_and_grads(weights, *jax.tree.map(lambda x: x[0], microbatches))
        return sum_scalars(jax.tree.map(lambda x: jnp.expand_dims(x, 0), value)), grads

    def grads_and_loss(*arguments):
        return loss_and_grads(*arguments)[::-1]

    def step(grads, microbatch):
        return add_gradients(grads, grads_and_loss, weights, *microbatch)

    zeros = jax.tree.map(lambda w: jnp.zeros_like(w, dtype=accum_dtype(w.dtype)), weights)
    grads, (losses, metrics) = jax.lax.scan(step, zeros, microbatches)
    grads = jax.tree.map(lambda sums, w: sums.astype(w.dtype), grads, weights)
    return sum_scalars((losses, metrics)), grads


def value(
    model: StagedModel, weights: dict[str, Any], batch_inputs: PyTree, keys: PyTree = ()
) -> tuple[Scalar, Aux]:
    """Returns loss and metrics of a batch, without a pipeline and without gradients.

    Example:
        >>> model = StagedModel(
        ...     embed=lambda w, batch: batch["x"] * w,
        ...     stage=lambda w, x, batch, rng: x + w,
        ...     loss=lambda boundary, y, batch: (jnp.sum(y * boundary["head"]), {}),
        ... )
        >>> weights = {"embed": jnp.ones(()), "stages": jnp.ones(3), "head": jnp.ones(())}
        >>> loss, metrics = value(model, weights, {"x": jnp.ones((2, 4))})
        >>> float(loss)
        32.0
    """
    microbatch_loss = _microbatch_loss(model, keys)

    def step(_, microbatch):
        return (), microbatch_loss(weights, *microbatch)

    return sum_scalars(jax.lax.scan(step, (), _microbatches(batch_inputs))[1])


def _microbatch_loss(model: StagedModel, keys: PyTree) -> Callable:
    """Returns the function `(weights, inputs of microbatch m, m) -> (loss, metrics)`."""

    def loss(weights, inputs_m, index):
        def step(x, stage):
            return model.stage(stage[0], x, inputs_m, fold_in_microbatch(stage[1], index))

        x = model.embed(weights["embed"], inputs_m)
        y, stage_aux = jax.lax.scan(step, x, (weights["stages"], keys))
        loss, loss_metrics = model.loss(model.boundary(weights), y, inputs_m)
        return combine_losses(loss, loss_metrics, sum_scalars(stage_aux))

    return loss


def _gradients_at_once(loss: Callable) -> Callable:
    """Returns the same loss, whose gradients are all computed before any of them is used."""

    @jax.custom_vjp
    def inputs(boundary: PyTree, y: PyTree) -> tuple[PyTree, PyTree]:
        return boundary, y

    def backward(_: None, gradients: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        leaves, tree = jax.tree.flatten(gradients)
        real = [i for i, leaf in enumerate(leaves) if leaf.dtype != jax.dtypes.float0]
        computed = jax.lax.optimization_barrier([leaves[i] for i in real])
        for i, leaf in zip(real, computed, strict=True):
            leaves[i] = leaf
        return jax.tree.unflatten(tree, leaves)

    inputs.defvjp(lambda *arguments: (inputs(*arguments), None), backward)
    return lambda boundary, y, inputs_m: loss(*inputs(boundary, y), inputs_m)


def _microbatches(batch_inputs: PyTree) -> tuple[PyTree, Array]:
    return batch_inputs, jnp.arange(jax.tree.leaves(batch_inputs)[0].shape[0])
