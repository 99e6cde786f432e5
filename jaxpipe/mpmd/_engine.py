"""Computes loss, metrics and gradients of a batch with the same contract as the other engines."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import PyTree, Scalar

from ..autodiff import Remat, StagedModel, recompute
from ..autodiff.staged_model import Aux, combine_losses, fold_in_microbatch, index_leading
from .ir._marks import mark_stage_end
from .ir._reduce import Add, treduce_i


def mpmd_value_and_grad(
    model: StagedModel,
    weights: dict[str, Any],
    batch_inputs: PyTree,
    keys: Sequence[PyTree] = (),
    *,
    schedule: Any,
    remat: Remat = recompute,
) -> tuple[tuple[Scalar, Aux], dict[str, Any]]:
    """Computes loss, metrics and gradients inside a function given to `mpmd_jit_with_loop`.

    Code that uses the results, such as a weight update, runs on the groups that hold them.

    Args:
        model: The model.
        weights: The weights under "embed", "stages" and "head". `weights["stages"]` is a sequence
            with the weights of each stage, in forward order: each stage has its own arrays, which
            are held by the group of that stage.
        batch_inputs: A pytree of [M, ...] arrays, for M microbatches, which every stage may read.
        keys: One tree of random keys for each stage, or () without dropout.
        schedule: A `jaxpipe.schedules.Schedule`, or one of the classes under JaxPP's names.
        remat: A function that wraps the stage. The default stores the input of the stage and
            recomputes the rest in the backward.

    Returns:
        ((loss, metrics), gradients like `weights`), summed over microbatches.
    """
    loss = _microbatch_loss(model, remat(model.stage), keys)
    grad = jax.value_and_grad(loss, has_aux=True)
    return _over_microbatches(grad, weights, batch_inputs, schedule)


def mpmd_value(
    model: StagedModel,
    weights: dict[str, Any],
    batch_inputs: PyTree,
    keys: Sequence[PyTree] = (),
    *,
    schedule: Any,
) -> tuple[Scalar, Aux]:
    """Computes loss and metrics: only the forwards of the schedule run, and store no residuals.

    Args:
        model: The model.
        weights: The weights under "embed", "stages" and "head". `weights["stages"]` is a sequence
            with the weights of each stage, in forward order.
        batch_inputs: A pytree of [M, ...] arrays, for M microbatches, which every stage may read.
        keys: One tree of random keys for each stage, or () without dropout.
        schedule: A `jaxpipe.schedules.Schedule`, or one of the classes under JaxPP's names.

    Returns:
        (loss, metrics), summed over microbatches.
    """
    return _over_microbatches(
        _microbatch_loss(model, model.stage, keys), weights, batch_inputs, schedule
    )


def _over_microbatches(
    f: Callable, weights: dict[str, Any], batch_inputs: PyTree, schedule: Any
) -> Any:
    def microbatch_fun(index: Any) -> Any:
        return f(weights, index_leading(batch_inputs, index), index)

    num_microbatches = jax.tree.leaves(batch_inputs)[0].shape[0]
    return treduce_i(microbatch_fun, num_microbatches, schedule=schedule, operation=Add)


def _microbatch_loss(model: StagedModel, stage: Callable, keys: Sequence[PyTree]) -> Callable:
    """Returns `(weights, inputs_m, index) -> (loss, metrics)` of a microbatch, with stage marks."""

    def loss(weights: dict[str, Any], inputs_m: PyTree, index: Any) -> Any:
        x, stage_aux = model.embed(weights["embed"], inputs_m), None
        stage_keys = keys if len(keys) else [()] * len(weights["stages"])
        for stage_weights, key in zip(weights["stages"], stage_keys, strict=True):
            x, aux = stage(stage_weights, x, inputs_m, fold_in_microbatch(key, index))
            x = mark_stage_end(x)
            stage_aux = aux if stage_aux is None else _add_metrics(stage_aux, aux)
        loss, loss_metrics = model.loss(model.boundary(weights), x, inputs_m)
        return combine_losses(loss, loss_metrics, stage_aux or {})

    return loss


def _add_metrics(totals: Aux, more: Aux) -> Aux:
    """Returns sums by name; stages whose layers are of other kinds may have other names."""
    sums = {name: x + more[name] for name, x in totals.items() if name in more}
    return totals | more | sums
