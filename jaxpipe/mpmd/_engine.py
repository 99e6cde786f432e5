"""Computes loss, metrics and gradients of a batch with the same contract as the other engines."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree, Scalar

from ..autodiff import Remat, StagedModel, keep, recompute
from ..autodiff.staged_model import (
    Aux,
    Past,
    accum_dtype,
    combine_losses,
    fold_in_microbatch,
    index_leading,
    merge_leading,
    split_metrics,
)
from ..schedules import Schedule
from ..schedules.language import num_slices
from .ir._marks import mark_part, mark_stage_end
from .ir._mpmd_graph import SlicedSchedule
from .ir._reduce import Add, Concat, treduce_with_shapes


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
        weights: The weights under "embed", "stages" and "head". `weights["stages"]` is a sequence
            with the weights of each stage, in forward order: each stage has its own arrays, which
            are held by the group of that stage.
        batch_inputs: A pytree of [M, ...] arrays, for M microbatches, which every stage may read;
            for a schedule with s slices [M * s, ...], the slices of a microbatch in order.

    Returns:
        ((loss, metrics), gradients like `weights`), summed over microbatches.
    """
    loss, over = _loss_and_loop(model, remat, keys, schedule)
    grad = jax.value_and_grad(loss, has_aux=True)

    def with_grads(*arguments: Any) -> Any:
        value, grads = grad(*arguments)
        return value, jax.tree.map(lambda x: x.astype(accum_dtype(x.dtype)), grads)

    value, sums = over(with_grads, weights, batch_inputs, schedule, "value_and_grad")
    return value, jax.tree.map(lambda total, w: total.astype(w.dtype), sums, weights)


def mpmd_value(
    model: StagedModel,
    weights: dict[str, Any],
    batch_inputs: PyTree,
    keys: Sequence[PyTree] = (),
    *,
    schedule: Any,
) -> tuple[Scalar, Aux]:
    """Computes loss and metrics: only the forwards of the schedule run, and store no residuals."""
    loss, over = _loss_and_loop(model, keep, keys, schedule)

    def without_grads(*arguments: Any) -> Any:
        return loss(*arguments), ()

    return over(without_grads, weights, batch_inputs, schedule, "value")[0]


def _loss_and_loop(
    model: StagedModel, remat: Remat, keys: Sequence[PyTree], schedule: Any
) -> tuple[Callable, Callable]:
    """Returns the loss of a microbatch, and the loop that runs such a function for all of them."""
    if isinstance(schedule, Schedule) and num_slices(schedule) > 1:
        return _loss_of_slices(model, remat, keys), _over_slices
    return _microbatch_loss(model, remat, keys), _over_microbatches


def _over_microbatches(
    f: Callable, weights: dict[str, Any], batch_inputs: PyTree, schedule: Any, caller: str
) -> Any:
    """Runs `f`, which returns ((loss, metrics), gradients), for every microbatch."""

    def microbatch_fun(index: Any) -> Any:
        return f(weights, index_leading(batch_inputs, index), index)

    num_microbatches = jax.tree.leaves(batch_inputs)[0].shape[0]
    return treduce_with_shapes(
        microbatch_fun, num_microbatches, schedule, _reduction, caller=caller
    )


def _reduction(of_microbatch: PyTree) -> PyTree:
    """Returns `Add` for everything but metrics that are arrays, which are stacked."""
    (_, metrics), *_ = of_microbatch
    return (Add, {name: Concat() if x.ndim else Add for name, x in metrics.items()}), Add


def _microbatch_loss(model: StagedModel, remat: Remat, keys: Sequence[PyTree]) -> Callable:
    """Returns `(weights, inputs_m, index) -> (loss, metrics)` of a microbatch, with stage marks."""

    def loss(weights: dict[str, Any], inputs_m: PyTree, index: Any) -> Any:
        x, stage_aux = model.embed(weights["embed"], inputs_m), None
        if model.hand_overs:
            x = model.hand_overs[0].take(x)
        stage_keys = keys if len(keys) else [()] * len(weights["stages"])
        for i, (of_stage, key) in enumerate(zip(weights["stages"], stage_keys, strict=True)):
            stage = remat(model.stage_of(i))
            x, aux = stage(of_stage, x, inputs_m, fold_in_microbatch(key, index))
            x = mark_stage_end(x)
            stage_aux = aux if stage_aux is None else _add_metrics(stage_aux, aux)
        if model.hand_overs:
            x = model.hand_overs[-1].restore(x)
        loss, loss_metrics = model.loss(model.boundary(weights), x, inputs_m)
        return combine_losses(loss, loss_metrics, stage_aux or {})

    return loss


def _over_slices(
    f: Callable, weights: Any, batch_inputs: PyTree, schedule: Schedule, caller: str
) -> Any:
    """Runs `f` for every microbatch, which takes the inputs of its slices as a list."""
    slices = range(num_slices(schedule))

    def microbatch_fun(index: Any) -> Any:
        inputs = [index_leading(batch_inputs, index * len(slices) + i) for i in slices]
        return f(weights, inputs, index)

    parts, count = SlicedSchedule(schedule), schedule.num_microbatches
    (loss, metrics), grads = treduce_with_shapes(
        microbatch_fun, count, parts, _reduction, caller=caller
    )
    scalars, arrays = split_metrics(metrics)  # arrays of slices are [M, s, ...]
    return (loss, scalars | merge_leading(arrays)), grads


def _loss_of_slices(model: StagedModel, remat: Remat, keys: Sequence[PyTree]) -> Callable:
    """Returns `(weights, inputs of slices, index) -> (loss, metrics)`, with marks of parts."""

    def loss(weights: dict[str, Any], inputs: list[PyTree], index: Any) -> Any:
        xs = [model.embed(weights["embed"], inputs_s) for inputs_s in inputs]
        aux: Aux = {}
        stage_keys = keys if len(keys) else [()] * len(weights["stages"])
        for i, (w, key) in enumerate(zip(weights["stages"], stage_keys, strict=True)):
            key = fold_in_microbatch(key, index)
            _, dims, _ = model.past_of_slices(len(xs), w, xs[0], inputs[0], key)
            run, earlier_slices = remat(_stage_of_slices(model, len(xs), dims)), []
            for part, inputs_s in enumerate(inputs):
                x, earlier = mark_part((xs[part], earlier_slices), i * len(xs) + part)
                y, more, new = run(w, x, inputs_s, (key, earlier))
                xs[part], new = mark_part((y, new), i * len(xs) + part)
                earlier_slices, aux = [*earlier_slices, new], _add_metrics(aux, more)
        boundary = model.boundary(weights)
        losses = [model.loss(boundary, x, inputs_s) for x, inputs_s in zip(xs, inputs, strict=True)]
        total, metrics = jax.tree.map(_sum_or_stack, *losses)
        return combine_losses(total, metrics, aux)

    return loss


def _stage_of_slices(model: StagedModel, num_slices: int, dims: Sequence[int]) -> Callable:
    """Returns the stage as a function of what the slices before have appended to the state.

    It is `(weights, x, inputs, (keys, a tree for each slice before)) -> (y, aux, tree)`. The trees
    are results of forwards, so no buffer is copied; and a slice attends to as many positions as it
    can see. The last slice appends nothing, as no slice would read it.
    """

    def run(
        weights: Any, x: Any, inputs: Any, keys_and_past: tuple[Any, list[Any]]
    ) -> tuple[Any, ...]:
        keys, earlier = keys_and_past
        assert model.sliced_stage is not None, "checked by `past_of_slices`"
        y, aux, past = model.sliced_stage(weights, x, inputs, keys, _past_of(earlier, dims))
        is_last = len(earlier) == num_slices - 1
        return y, aux, () if is_last else past.new

    return run


def _past_of(earlier: list[PyTree], dims: Sequence[int]) -> Past:
    """Returns the state for the last of `len(earlier) + 1` slices."""
    if not earlier:
        return Past()
    structure = jax.tree.structure(earlier[0])
    parts = list(zip(*map(jax.tree.leaves, earlier), strict=True))
    leaves = [
        lax.concatenate([*of_leaf, jnp.zeros_like(of_leaf[0])], dim)
        for of_leaf, dim in zip(parts, dims, strict=True)
    ]
    offset = len(earlier) * parts[0][0].shape[dims[0]]
    return Past(structure.unflatten(leaves), offset=offset, num_slices=len(earlier) + 1)


def _sum_or_stack(*parts: jax.Array) -> jax.Array:
    """Returns the sum of scalars of all slices; arrays are stacked."""
    return jnp.stack(parts) if parts[0].ndim else sum(parts[1:], parts[0])


def _add_metrics(totals: Aux, more: Aux) -> Aux:
    """Returns sums by name; stages whose layers are of other kinds may have other names."""
    sums = {name: x + more[name] for name, x in totals.items() if name in more}
    return totals | more | sums
