"""Loss and gradients of a whole model on one rank: embedding, circular pipeline, loss, backward.

S ranks, M microbatches, n = M / S of them on each rank, which embeds these and computes their loss.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree, Scalar, Shaped

from ...autodiff import StagedModel
from ...autodiff.backward import floating
from ...autodiff.staged_model import Aux, combine_losses, total
from .._boundary import add_to_boundary, loss_and_gradients
from .._buffers import cast_like, to_accum_dtype
from ..ranks import AXIS, pvary, zeros
from ..weight_gather import Gather
from ._backward import backward
from ._invariants import CircularOptions, prepare
from ._passes import forward


def rank_value_and_grad(
    model: StagedModel,
    options: CircularOptions,
    boundary_gather: Gather,
    stages: PyTree[Shaped[Array, "R ..."]],
    boundary: dict[str, PyTree],
    batch_inputs: PyTree[Shaped[Array, "M ..."]],
    keys: PyTree[Shaped[Array, "R ..."]],
) -> tuple[tuple[Scalar, Aux], tuple[PyTree, dict[str, PyTree]]]:
    """Returns loss, metrics and gradients of the batch, as computed by one rank inside `stage`.

    Over the batch axes, if there are any, each device runs on its own rows.
    """
    gathered = boundary_gather.cast_and_unshard(boundary)
    share = _share_of_rank(batch_inputs)
    x, pull_embed = _pullback(lambda w: _embed(model, w, share), gathered["embed"])
    invariants, aux_shapes = prepare(model.stage, options, stages, x, batch_inputs, keys)
    (y, stage_aux), residuals = forward(invariants, x, aux_shapes, save_residuals=True)
    (loss, loss_metrics), (boundary_grads, dy) = _loss_and_gradients(model, gathered, y, share)
    daux = {name: jnp.full_like(s, 1 if name == "loss" else 0) for name, s in stage_aux.items()}
    gradients, dx, _ = backward(invariants, residuals, dy, daux)
    (embed_grads,) = pull_embed(dx)
    boundary_grads["embed"] = jax.tree.map(
        jnp.add, boundary_grads["embed"], to_accum_dtype(embed_grads)
    )
    totals = lax.psum((loss, loss_metrics, stage_aux), (AXIS, *options.gather.batch_axes))
    boundary_grads = boundary_gather.reduce_scatter(lax.psum(boundary_grads, AXIS))
    return combine_losses(*totals), (
        cast_like(gradients, stages),
        cast_like(boundary_grads, boundary),
    )


def rank_value(
    model: StagedModel,
    options: CircularOptions,
    boundary_gather: Gather,
    stages: PyTree[Shaped[Array, "R ..."]],
    boundary: dict[str, PyTree],
    batch_inputs: PyTree[Shaped[Array, "M ..."]],
    keys: PyTree[Shaped[Array, "R ..."]],
) -> tuple[Scalar, Aux]:
    """Returns (loss, metrics) of the batch, without gradients, and stores no residuals.

    Takes the arguments of `rank_value_and_grad`.
    """
    gathered = boundary_gather.cast_and_unshard(boundary)
    share = _share_of_rank(batch_inputs)
    x = _embed(model, gathered["embed"], share)
    invariants, aux_shapes = prepare(model.stage, options, stages, x, batch_inputs, keys)
    (y, stage_aux), _ = forward(invariants, x, aux_shapes, save_residuals=False)

    def step(_, microbatch):
        return (), model.loss(model.boundary(gathered), *microbatch)

    _, (losses, loss_metrics) = lax.scan(step, (), (y, share))
    totals = jnp.sum(losses), total(loss_metrics), stage_aux
    return combine_losses(*lax.psum(totals, (AXIS, *options.gather.batch_axes)))


def _embed(model: StagedModel, weights: PyTree, share: PyTree) -> PyTree:
    """Runs the embedding; constants in its output vary over ranks too, as what stages return."""
    return jax.tree.map(pvary, jax.vmap(model.embed, in_axes=(None, 0))(weights, share))


def _loss_and_gradients(
    model: StagedModel, boundary: dict[str, PyTree], y: PyTree, share: PyTree
) -> tuple[tuple[Scalar, Aux], tuple[dict[str, PyTree], PyTree]]:
    """Computes the loss of this rank's microbatches, one after the other, and its gradients.

    The gradients are computed together with the loss, so logits are computed once, and only those
    of one microbatch are in memory.
    """

    def step(gradients, microbatch):
        value, (boundary_grads, dy) = loss_and_gradients(model, boundary, *microbatch)
        return add_to_boundary(gradients, boundary_grads), (value, dy)

    zero_grads = jax.tree.map(zeros, to_accum_dtype(boundary))
    gradients, ((losses, metrics), dy) = lax.scan(step, zero_grads, (y, share))
    return (jnp.sum(losses), total(metrics)), (gradients, dy)


def _pullback(f: Callable, weights: PyTree) -> tuple[PyTree, Callable]:
    """Returns `f(weights)` and its VJP, which takes cotangents of the floating leaves."""

    def f_of_floating(weights):
        out = f(weights)
        return floating(out), out

    _, pull, out = jax.vjp(f_of_floating, weights, has_aux=True)
    return out, pull


def _share_of_rank(tree: PyTree) -> PyTree:
    """Slices this rank's [n, ...] out of [M, ...] leaves."""

    def share(x: Any) -> Any:
        size = x.shape[0] // lax.axis_size(AXIS)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(AXIS) * size, size)

    return jax.tree.map(share, tree)
