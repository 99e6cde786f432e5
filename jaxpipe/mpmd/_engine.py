"""The contract of all engines: loss, metrics and gradients of a batch, stage by stage."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import PyTree, Scalar

from ..autodiff import (
    Model,
    Remat,
    Sums,
    combine_losses,
    fold_in_microbatch,
    index_leading,
    recompute,
)
from .ir._marks import mark_stage_end
from .ir._reduce import Add, treduce_i


def mpmd_value_and_grad(
    model: Model,
    weights: dict[str, Any],
    side: PyTree,
    keys: Sequence[PyTree] = (),
    *,
    schedule: Any,
    remat: Remat = recompute,
) -> tuple[tuple[Scalar, Sums], dict[str, Any]]:
    """Loss, metrics and gradients of a batch, for a function given to `mpmd_jit_with_loop`.

    What is made of them there, such as an update of the weights, runs where they are.

    Args:
        model: The model.
        weights: The three groups; `weights["stages"]` is a sequence of the weights of each stage,
            in forward order, so that each can live on the ranks of its own.
        side: [M, ...] leaves.
        keys: One tree for each stage, or () without dropout.
        schedule: A `jaxpipe.schedules.Schedule`, or one of the classes under JaxPP's names.
        remat: Wraps the stage. Default: keep its input, compute the rest again in the backward.

    Returns:
        ((loss, metrics), gradients like `weights`).
    """
    loss = _microbatch_loss(model, remat(model.stage), keys)
    grad = jax.value_and_grad(loss, has_aux=True)
    return _over_microbatches(grad, weights, side, schedule)


def mpmd_value(
    model: Model,
    weights: dict[str, Any],
    side: PyTree,
    keys: Sequence[PyTree] = (),
    *,
    schedule: Any,
) -> tuple[Scalar, Sums]:
    """(loss, metrics) alone: of the schedule the forwards run, without anything kept.

    The arguments are those of `mpmd_value_and_grad`.
    """
    return _over_microbatches(_microbatch_loss(model, model.stage, keys), weights, side, schedule)


def _over_microbatches(f: Callable, weights: dict[str, Any], side: PyTree, schedule: Any) -> Any:
    def of_microbatch(index: Any) -> Any:
        return f(weights, index_leading(side, index), index)

    num_microbatches = jax.tree.leaves(side)[0].shape[0]
    return treduce_i(of_microbatch, num_microbatches, schedule=schedule, operation=Add)


def _microbatch_loss(model: Model, stage: Callable, keys: Sequence[PyTree]) -> Callable:
    """`(weights, side of one microbatch, its index) -> (loss, metrics)`, with marks."""

    def loss(weights: dict[str, Any], side_m: PyTree, index: Any) -> Any:
        x, of_stages = model.embed(weights["embed"], side_m), None
        of_stage = keys if len(keys) else [()] * len(weights["stages"])
        for of_weights, key in zip(weights["stages"], of_stage, strict=True):
            x, sums = stage(of_weights, x, side_m, fold_in_microbatch(key, index))
            x = mark_stage_end(x)
            of_stages = sums if of_stages is None else _added(of_stages, sums)
        loss, of_loss = model.loss(model.ends(weights), x, side_m)
        return combine_losses(loss, of_loss, of_stages or {})

    return loss


def _added(sums: Sums, more: Sums) -> Sums:
    return {name: x + more[name] for name, x in sums.items()}
