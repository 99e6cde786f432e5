"""Phases of a tick of a schedule on one rank: F, with embedding and loss, then B or I, then W.

The first stage embeds its microbatch, and the last one computes its loss and the loss's gradient
right after its F. Every phase takes the buffers and the totals that are carried from tick to tick.
It returns new totals, and arrays to be stored in the buffers or sent to other ranks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree, Scalar

from ...autodiff import Model
from ...autodiff._model import Aux, fold_in_microbatch, index_leading
from ...autodiff._pullback import floating
from ...autodiff._split_backward import SplitBackward
from ...ir._accumulate import add_gradients
from ...schedules.lock_step import TickTables
from .._ranks import AXIS
from .._varying import cond
from ..circular_engine._loss import add_to_boundary, loss_and_gradients
from ._weights import Chunks, Held, Work


class Run(NamedTuple):
    """Loop invariants: the values that a tick reads and does not change, on one rank.

    Attributes:
        model: The model.
        num_stages: Number of stages of the model.
        last: The stage after which its rank computes the loss alone; `num_stages`, which is no
            stage, if all ranks compute the loss together.
        stage: The stage as F, B, I and W; None if no backward follows.
        weights: Functions that gather this rank's weights and reduce-scatter their gradients.
        boundary: Weights of embedding and head, gathered.
        batch_inputs: [M, ...] leaves.
        keys: [v, ...] leaves, or ().
        daux: Cotangents of a stage's auxiliary losses and metrics.
    """

    model: Model
    num_stages: int
    last: int
    stage: SplitBackward | None
    weights: Chunks
    boundary: dict[str, PyTree]
    batch_inputs: PyTree
    keys: PyTree
    daux: Aux


class Waiting(NamedTuple):
    """Buffers, [slots, ...] leaves, for arrays stored between ticks (`schedules.Slots`)."""

    inputs: PyTree
    cotangents: PyTree
    for_backward: list[jax.Array]
    for_weight: list[jax.Array]
    links: list[jax.Array]


class Totals(NamedTuple):
    """Losses, metrics and gradients that are accumulated over ticks, and gathered weights.

    Attributes:
        loss: Loss of the microbatches whose loss this rank computed.
        loss_metrics: Metrics that `model.loss` returned for these microbatches.
        stage_aux: Auxiliary losses and metrics that this rank's stages returned.
        stages: Float32 gradients of the stages' weights, and gathered weights.
        boundary: Float32 gradients of embedding and head.
    """

    loss: Scalar
    loss_metrics: Aux
    stage_aux: Aux
    stages: Held
    boundary: dict[str, PyTree]


class Left(NamedTuple):
    """Results of an F: the activation to send, and the arrays that its rank stores."""

    activation: PyTree
    cotangent: PyTree
    for_backward: list[jax.Array]
    for_weight: list[jax.Array]


def divide(stage: SplitBackward, residuals: list[Any]) -> tuple[list[Any], list[Any]]:
    """Splits residuals into those that only B or I reads, and those that W reads too."""
    pairs = list(zip(residuals, stage.for_weight, strict=True))
    return [r for r, late in pairs if not late], [r for r, late in pairs if late]


def forward(
    run: Run, work: Work, waiting: Waiting, totals: Totals, nothing: Left
) -> tuple[Totals, Left]:
    """Runs F; on the last stage its results include the cotangent of the stage's output."""
    batch_inputs, keys = _of(run, work)
    w = run.weights.read(totals.stages, work, True)
    arrived = index_leading(waiting.inputs, work.input_slot)
    embed = lambda: run.model.embed(run.boundary["embed"], batch_inputs)  # noqa: E731
    x = cond(work.stage == 0, embed, lambda: arrived, like=arrived)
    kept: tuple[list, list] = ([], [])
    if run.stage is None:
        y, aux = run.model.stage(w, x, batch_inputs, keys)
    else:
        (y, aux), residuals = run.stage.forward(w, x, batch_inputs, keys)
        kept = divide(run.stage, residuals)
    totals = totals._replace(stage_aux=_add(totals.stage_aux, aux))
    totals, cotangent = cond(
        work.stage == run.last,
        lambda totals: _loss(run, y, batch_inputs, totals),
        lambda totals: (totals, nothing.cotangent),
        totals,
        like=(totals, nothing.cotangent),
    )
    return totals, Left(y, cotangent, *kept)


def _of(run: Run, work: Work) -> tuple[PyTree, PyTree]:
    """Returns batch_inputs and keys of the microbatch and the chunk of `work`."""
    return index_leading(run.batch_inputs, work.microbatch), fold_in_microbatch(
        index_leading(run.keys, work.chunk), work.microbatch
    )


def _loss(run: Run, y: PyTree, batch_inputs: PyTree, totals: Totals) -> tuple[Totals, PyTree]:
    """Adds the loss of a microbatch to `totals`; returns them and the gradient with respect to `y`.

    The gradients are computed together with the loss, so logits are computed once.
    """
    if run.stage is None:
        value, metrics = run.model.loss(run.model.boundary(run.boundary), y, batch_inputs)
        return _with_loss(totals, value, metrics), ()
    (value, metrics), (boundary_grads, dy) = loss_and_gradients(
        run.model, run.boundary, y, batch_inputs
    )
    return _with_loss(totals, value, metrics, boundary_grads), dy


def shared_loss(run: Run, y: PyTree, batch_inputs: PyTree, totals: Totals) -> tuple[Totals, PyTree]:
    """Adds this rank's share of a loss to `totals`; returns them and the whole gradient by `y`."""
    shared = run.model.shared_loss
    assert shared is not None, "checked at the entry"
    (value, metrics), (boundary_grads, dy) = shared(
        run.model.boundary(run.boundary), y, batch_inputs, AXIS
    )
    if run.stage is None:
        return _with_loss(totals, value, metrics), ()
    return _with_loss(totals, value, metrics, boundary_grads), dy


def _with_loss(
    totals: Totals, value: Scalar, metrics: Aux, boundary_grads: dict[str, PyTree] | None = None
) -> Totals:
    return totals._replace(
        loss=totals.loss + value,
        loss_metrics=_add(totals.loss_metrics, metrics),
        boundary=add_to_boundary(totals.boundary, boundary_grads or {}),
    )


Backward = tuple[Totals, tuple[PyTree, list[jax.Array]]]
"""Totals, the cotangent for the stage before, and the residuals that I stores for W."""


def backward(tables: TickTables) -> Callable:
    """Returns the function that runs B, or I, or in a schedule with both the one of the table.

    It is `(run, work, waiting, totals, empty residuals for W) -> Backward`.
    """
    links = {
        link >= 0
        for microbatches, row in zip(
            tables.backward.microbatch, tables.backward.wgrad_residuals_slot, strict=True
        )
        for microbatch, link in zip(microbatches, row, strict=True)
        if microbatch >= 0
    }

    def as_told(run: Run, work: Work, waiting: Waiting, totals: Totals, empty: list) -> Backward:
        return cond(
            work.wgrad_residuals_slot >= 0,
            lambda totals: _half(run, work, waiting, totals, empty),
            lambda totals: _whole(run, work, waiting, totals, empty),
            totals,
            like=(totals, (index_leading(waiting.cotangents, work.cotangent_slot), empty)),
        )

    return as_told if len(links) == 2 else _half if True in links else _whole


def _whole(run: Run, work: Work, waiting: Waiting, totals: Totals, empty: list) -> Backward:
    """Runs B: gradients of the input and of the weights."""
    stage = _divided(run)
    batch_inputs, keys = _of(run, work)
    w = run.weights.read(totals.stages, work, False)
    kept, cotangent = _kept(run, work, waiting)

    def add(gradient):
        gradient, dx, _ = stage.backward(w, batch_inputs, keys, kept, cotangent, gradient)
        return gradient, dx

    stages, dx = run.weights.add(totals.stages, work, add)
    return _embedded(run, work, batch_inputs, dx, totals._replace(stages=stages)), (dx, empty)


def _half(run: Run, work: Work, waiting: Waiting, totals: Totals, empty: list) -> Backward:
    """Runs I: the gradient of the input, and residuals for W."""
    del empty
    stage = _divided(run)
    batch_inputs, keys = _of(run, work)
    w = run.weights.read(totals.stages, work, False)
    dx, _, link = stage.input(w, batch_inputs, keys, *_kept(run, work, waiting))
    return _embedded(run, work, batch_inputs, dx, totals), (dx, link)


def weight(run: Run, work: Work, waiting: Waiting, totals: Totals) -> Totals:
    """Runs W: adds the gradient of the weights."""
    stage = _divided(run)
    batch_inputs, keys = _of(run, work)
    w = run.weights.read(totals.stages, work, False)
    kept, link = (
        index_leading(waiting.for_weight, work.residuals_for_weight_slot),
        index_leading(waiting.links, work.wgrad_residuals_slot),
    )

    def add(gradient):
        return stage.weight(w, batch_inputs, keys, kept, link, gradient), ()

    return totals._replace(stages=run.weights.add(totals.stages, work, add)[0])


def _divided(run: Run) -> SplitBackward:
    assert run.stage is not None, "a schedule with backwards has a stage that is divided"
    return run.stage


def _kept(run: Run, work: Work, waiting: Waiting) -> tuple[list[jax.Array], tuple[PyTree, Aux]]:
    """Returns the residuals that F stored, and the cotangent of the results of F."""
    early = iter(index_leading(waiting.for_backward, work.residuals_for_backward_slot))
    late = iter(index_leading(waiting.for_weight, work.residuals_for_weight_slot))
    residuals = [next(late) if is_late else next(early) for is_late in _divided(run).for_weight]
    return residuals, (index_leading(waiting.cotangents, work.cotangent_slot), run.daux)


def _embedded(run: Run, work: Work, batch_inputs: PyTree, dx: PyTree, totals: Totals) -> Totals:
    """Adds the gradient of the embedding, if this is the backward of the first stage."""

    def gradient(weights, batch_inputs, dx):
        _, pull = jax.vjp(lambda w: floating(run.model.embed(w, batch_inputs)), weights)
        return pull(dx)[0]

    def add(so_far):
        return add_gradients(gradient, run.boundary["embed"], batch_inputs, dx)(so_far)

    so_far = totals.boundary["embed"]
    embed_grads = cond(work.stage == 0, add, lambda so_far: so_far, so_far, like=so_far)
    return totals._replace(boundary=totals.boundary | {"embed": embed_grads})


def _add(so_far: PyTree, new: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, so_far, new)
