"""Loss and gradients of a whole model on one rank: embedding, circular pipeline, loss, backward.

S ranks, M microbatches, n = M / S of them on each rank, which embeds these and computes their loss.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree, Scalar, Shaped

from ...autodiff import StagedModel
from ...autodiff.backward import floating
from ...autodiff.staged_model import (
    Aux,
    has_custom_vjp,
    index_leading,
    split_metrics,
    sum_scalars,
)
from .._boundary import add_to_boundary, loss_and_gradients, sum_over_devices
from .._buffers import broadcast, cast_like, own_entries, put, to_accum_dtype
from ..ranks import AXIS, pvary, zeros, zeros_like
from ..weight_gather import Gather
from ._invariants import CircularOptions, prepare
from ._passes import backward, forward


def rank_value_and_grad(
    model: StagedModel,
    stages: PyTree[Shaped[Array, "R ..."]],
    boundary: dict[str, PyTree],
    batch_inputs: PyTree[Shaped[Array, "M ..."]],
    keys: PyTree[Shaped[Array, "R ..."]],
    *,
    options: CircularOptions,
    boundary_gather: Gather,
) -> tuple[tuple[tuple[Scalar, Aux], Aux], tuple[PyTree, dict[str, PyTree]]]:
    """Returns loss, metrics and gradients of the batch, as computed by one rank inside `stage`.

    Metrics that are arrays are those of this rank's n microbatches, beside the loss.

    Over the batch axes, if there are any, each device runs on its own rows.
    """
    gathered = boundary_gather.cast_and_unshard(boundary)
    share = _share_of_rank(batch_inputs)
    x, pull_embed = _pullback(lambda w: _embed(model, w, share), gathered["embed"])
    invariants, aux_shapes = prepare(model.stage, options, stages, x, batch_inputs, keys)
    (y, stage_aux), residuals = forward(invariants, x, aux_shapes, save_residuals=True)
    losses = _losses_of_all_ranks if options.engine.vocab_parallel else _losses_of_rank
    (loss, loss_metrics), (boundary_grads, dy) = losses(model, gathered, y, batch_inputs)
    daux = {name: jnp.full_like(s, 1 if name == "loss" else 0) for name, s in stage_aux.items()}
    gradients, dx, _ = backward(invariants, residuals, dy, daux)
    (embed_grads,) = pull_embed(dx)
    boundary_grads["embed"] = jax.tree.map(
        jnp.add, boundary_grads["embed"], to_accum_dtype(embed_grads)
    )
    value = sum_over_devices(options.gather, loss, loss_metrics, stage_aux)
    boundary_grads = boundary_gather.reduce_scatter(lax.psum(boundary_grads, AXIS))
    return value, (
        cast_like(gradients, stages),
        cast_like(boundary_grads, boundary),
    )


def rank_value(
    model: StagedModel,
    stages: PyTree[Shaped[Array, "R ..."]],
    boundary: dict[str, PyTree],
    batch_inputs: PyTree[Shaped[Array, "M ..."]],
    keys: PyTree[Shaped[Array, "R ..."]],
    *,
    options: CircularOptions,
    boundary_gather: Gather,
) -> tuple[tuple[Scalar, Aux], Aux]:
    """Returns ((loss, metrics), metrics that are arrays), without gradients.

    Takes the arguments of `rank_value_and_grad`.
    """
    gathered = boundary_gather.cast_and_unshard(boundary)
    share = _share_of_rank(batch_inputs)
    x = _embed(model, gathered["embed"], share)
    invariants, aux_shapes = prepare(model.stage, options, stages, x, batch_inputs, keys)
    (y, stage_aux), _ = forward(invariants, x, aux_shapes, save_residuals=False)

    if options.engine.vocab_parallel:
        (loss, metrics), _ = _losses_of_all_ranks(model, gathered, y, batch_inputs)
    else:

        def step(_, microbatch):
            return (), model.loss(model.boundary(gathered), *microbatch)

        loss, metrics = sum_scalars(lax.scan(step, (), (y, share))[1])
    return sum_over_devices(options.gather, loss, metrics, stage_aux)


def _embed(model: StagedModel, weights: PyTree, share: PyTree) -> PyTree:
    """Runs the embedding; constants in its output vary over ranks too, as what stages return."""
    # A backward of its own is given the cotangents of one microbatch, not a sum over them.
    by_microbatch = has_custom_vjp(model.embed, weights, index_leading(share, 0))
    run = partial(model.embed, weights)
    x = lax.map(run, share) if by_microbatch else jax.vmap(run)(share)
    return jax.tree.map(pvary, x)


def _losses_of_rank(
    model: StagedModel, boundary: dict[str, PyTree], y: PyTree, batch_inputs: PyTree
) -> tuple[tuple[Scalar, Aux], tuple[dict[str, PyTree], PyTree]]:
    """Computes the loss of this rank's microbatches, one after the other, and its gradients.

    The gradients are computed together with the loss, so logits are computed once, and only those
    of one microbatch are in memory.
    """

    def step(gradients, microbatch):
        value, (boundary_grads, dy) = loss_and_gradients(model, boundary, *microbatch)
        return add_to_boundary(gradients, boundary_grads), (value, dy)

    zero_grads = jax.tree.map(zeros, to_accum_dtype(boundary))
    gradients, ((losses, metrics), dy) = lax.scan(
        step, zero_grads, (y, _share_of_rank(batch_inputs))
    )
    return sum_scalars((losses, metrics)), (gradients, dy)


def _losses_of_all_ranks(
    model: StagedModel, boundary: dict[str, PyTree], y: PyTree, batch_inputs: PyTree
) -> tuple[tuple[Scalar, Aux], tuple[dict[str, PyTree], PyTree]]:
    """Computes what `_losses_of_rank` does, with every rank's part of the loss of M microbatches.

    The losses of all ranks sum up to that of the batch, and so do the gradients of `boundary`.
    """
    loss, n = model.vocab_parallel_loss, jax.tree.leaves(y)[0].shape[0]
    assert loss is not None, "checked at the entry"

    def step(carry, m):
        gradients, dy = carry
        is_source, slot = lax.axis_index(AXIS) == m // n, m % n
        everywhere = jax.tree.map(partial(broadcast, is_source), index_leading(y, slot))
        value, (boundary_grads, new) = loss(
            model.boundary(boundary), everywhere, index_leading(batch_inputs, m), AXIS
        )
        own = jax.tree.map(partial(jnp.where, is_source), new, index_leading(dy, slot))
        return (add_to_boundary(gradients, boundary_grads), put(dy, own, slot)), value

    zero_grads = jax.tree.map(zeros, to_accum_dtype(boundary))
    num_microbatches = n * lax.axis_size(AXIS)
    carry, (losses, metrics) = lax.scan(
        step, (zero_grads, zeros_like(floating(y))), jnp.arange(num_microbatches)
    )
    scalars, arrays = split_metrics(sum_scalars(metrics))
    return (jnp.sum(losses), scalars | own_entries(arrays)), carry


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
