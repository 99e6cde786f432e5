"""Phases of a tick of a schedule on one rank: F, with embedding and loss, then B or I, then W.

The first stage embeds its microbatch, and the last one computes its loss and the loss's gradient
right after its F. Every phase takes the buffers and the totals that are carried from tick to tick.
It returns new totals, and arrays to be stored in the buffers or sent to other ranks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Scalar, Shaped

from ...autodiff import StagedModel
from ...autodiff.backward import SplitBackward
from ...autodiff.staged_model import Aux, fold_in_microbatch, index_leading
from ...schedules.lock_step import TickTables
from .._buffers import add_trees, broadcast, put, to_accum_dtype
from ..ranks import AXIS, cond, update_if
from ._boundary_sums import add_embed_gradient, add_loss_gradients, add_whole, embed_group
from ._past import PastLayout, SliceInputs, StageOutputs, cotangent_of_new, slice_inputs
from ._residuals import Residuals, entries_to_read, entries_to_write, merge_residuals, run_forward
from ._rows import Index, PhaseRow, stage_hint, visits_stage
from ._weights import ScheduledWeights


class ScheduledInvariants(NamedTuple):
    """Loop invariants: the values that a tick reads and does not change, on one rank.

    Attributes:
        loss_stage: The stage after which its rank computes the loss alone; `num_stages`, which is
            no stage, if all ranks compute the loss together.
        tables: The tables of the loop that runs; outside of loops, of all ticks.
        past: The state that slices of a sequence carry.
        run_stage: The stage, for a schedule of forwards alone.
        stage: The stage as F, B, I and W; None if no backward follows.
        residuals: Types of what F stores, in the memory where it is stored.
        boundary: Weights of embedding and head, gathered.
        daux: Cotangents of a stage's auxiliary losses and metrics.
    """

    model: StagedModel
    num_stages: int
    loss_stage: int
    tables: TickTables
    past: PastLayout
    run_stage: Callable
    stage: SplitBackward | None
    residuals: Residuals
    gather: ScheduledWeights
    boundary: dict[str, PyTree]
    batch_inputs: PyTree[Shaped[Array, "M ..."]]
    keys: PyTree[Shaped[Array, "c ..."]]
    daux: Aux


class ActivationBuffers(NamedTuple):
    """Buffers for arrays stored between ticks; `schedules.lock_step` assigns their slots.

    Attributes:
        inputs: [slots, ...] activations that wait for their F.
        cotangents: [slots, ...] cotangents that wait for their B or I; () without backwards.
        for_backward: [slots, ...] each, residuals that only B or I reads.
        for_weight: [slots, ...] each, residuals that W reads too.
        wgrad_residuals: [slots, ...] each, what I leaves for W; [] if all backwards are whole.
        past: [slots, ...] each, the state of a microbatch whose slices run; [] without slices.
        past_cotangents: [slots, ...] each, the cotangent of that state, summed in float32.
    """

    inputs: PyTree
    cotangents: PyTree
    for_backward: list[Any]
    for_weight: list[Any]
    wgrad_residuals: list[jax.Array]
    past: list[jax.Array]
    past_cotangents: list[jax.Array]


class Totals(NamedTuple):
    """Losses, metrics and gradients that are accumulated over ticks, and gathered weights.

    Attributes:
        loss: Loss of the microbatches whose loss this rank computed.
        loss_metrics: Metrics that `model.loss` returned for these microbatches.
        weight_state: Float32 gradients of the stages' weights, and gathered weights: the state of
            `ScheduledWeights`.
        boundary: Float32 gradients of embedding and head, in the groups of `_boundary_sums`.
    """

    loss: Scalar
    loss_metrics: Aux
    stage_aux: Aux
    weight_state: PyTree
    boundary: dict[str, PyTree]


class ForwardTotals(NamedTuple):
    """What an F changes in place.

    Attributes:
        residuals: [slots, ...] each, the buffers of residuals in the device's memory; None for
            those in the host's.
    """

    totals: Totals
    residuals: Residuals


class ForwardOutputs(NamedTuple):
    """Results of an F: the activation to send, and the arrays that its rank stores.

    Attributes:
        activation: The output of the stage, of one microbatch.
        cotangent: Its cotangent, where the loss is computed, else zeros; () without backwards.
        on_host: The residuals that are stored in the host's memory, None for all others.
        new: The keys and values that a slice adds to the state; [] without slices.
    """

    activation: PyTree
    cotangent: PyTree
    on_host: Residuals
    new: list[jax.Array]


def forward(
    invariants: ScheduledInvariants,
    work: PhaseRow,
    buffers: ActivationBuffers,
    changed: ForwardTotals,
    zero_outputs: ForwardOutputs,
) -> tuple[ForwardTotals, ForwardOutputs]:
    """Runs F; on the last stage its results include the cotangent of the stage's output."""
    totals = changed.totals
    inputs, keys = _inputs_and_keys(invariants, work, buffers)
    arrived = index_leading(buffers.inputs, work.input_slot)
    x, table = arrived, invariants.tables.forward
    if visits_stage(table, 0):
        embed = lambda: invariants.model.embed(invariants.boundary["embed"], inputs.batch)  # noqa: E731
        hint = stage_hint(table, 0)
        x = cond(work.stage == 0, embed, lambda: arrived, like=arrived, hint=hint)
    written, on_host = changed.residuals, ([], [])
    if invariants.stage is None:
        w = invariants.gather.unshard(totals.weight_state, work, True)
        (y, new), aux = invariants.run_stage(w, x, inputs, keys)
    else:
        w = invariants.gather.entries(totals.weight_state, work, True)
        slots = work.residuals_for_backward_slot, work.residuals_for_weight_slot
        ((y, new), aux), written, on_host = run_forward(
            invariants.stage, (w, x, inputs, keys), changed.residuals, slots
        )
    totals = totals._replace(stage_aux=add_trees(totals.stage_aux, aux))
    cotangent = zero_outputs.cotangent
    if visits_stage(table, invariants.loss_stage):
        totals, cotangent = update_if(
            work.stage == invariants.loss_stage,
            lambda state: _loss(invariants, y, inputs.batch, work.microbatch, state[0]),
            (totals, cotangent),
            hint=stage_hint(table, invariants.loss_stage),
        )
    return ForwardTotals(totals, written), ForwardOutputs(y, cotangent, on_host, new)


def _inputs_and_keys(
    invariants: ScheduledInvariants, work: PhaseRow, buffers: ActivationBuffers
) -> tuple[SliceInputs, PyTree]:
    """Returns inputs and keys of the microbatch (or the slice of one) and the chunk of `work`."""
    batch_inputs = index_leading(invariants.batch_inputs, work.microbatch)
    keys = fold_in_microbatch(index_leading(invariants.keys, work.chunk), work.microbatch)
    return slice_inputs(invariants.past, batch_inputs, buffers.past, work), keys


def _loss(
    invariants: ScheduledInvariants,
    y: PyTree,
    batch_inputs: PyTree,
    microbatch: Index,
    totals: Totals,
) -> tuple[Totals, PyTree]:
    """Adds the loss of a microbatch to `totals`, and returns the gradient with respect to `y` too.

    The gradients are computed together with the loss, so logits are computed once.
    """
    if invariants.stage is None:
        value, metrics = invariants.model.loss(
            invariants.model.boundary(invariants.boundary), y, batch_inputs
        )
        return _with_loss(totals, microbatch, value, metrics), ()
    arguments = invariants.model, invariants.boundary, y, batch_inputs, totals.boundary
    (value, metrics), sums, dy = add_loss_gradients(*arguments)
    return _with_loss(totals._replace(boundary=sums), microbatch, value, metrics), dy


def _vocab_parallel_loss(
    invariants: ScheduledInvariants,
    y: PyTree,
    batch_inputs: PyTree,
    microbatch: Index,
    totals: Totals,
) -> tuple[Totals, PyTree]:
    """Adds this rank's share of a loss to `totals`; returns them and the whole gradient by `y`."""
    loss = invariants.model.vocab_parallel_loss
    assert loss is not None, "checked at the entry"
    (value, metrics), (boundary_grads, dy) = loss(
        invariants.model.boundary(invariants.boundary), y, batch_inputs, AXIS
    )
    totals = _with_loss(totals, microbatch, value, metrics)
    if invariants.stage is None:
        return totals, ()
    return totals._replace(boundary=add_whole(totals.boundary, boundary_grads)), dy


def _with_loss(totals: Totals, microbatch: Index, value: Scalar, metrics: Aux) -> Totals:
    so_far = totals.loss_metrics
    return totals._replace(
        loss=totals.loss + value,
        loss_metrics={
            name: put(so_far[name], x, microbatch) if jnp.ndim(x) else so_far[name] + x
            for name, x in metrics.items()
        },
    )


def loss_on_all_ranks(
    invariants: ScheduledInvariants,
    work: PhaseRow,
    outputs: ForwardOutputs,
    microbatch: Index,
    totals: Totals,
) -> tuple[Totals, ForwardOutputs]:
    """Broadcasts the output of the last stage to all ranks, which compute its loss together.

    The condition is the same on all ranks, so they may communicate under it.
    """
    is_source = (work.microbatch == microbatch) & (work.stage == invariants.num_stages - 1)

    def loss(totals: Totals) -> tuple[Totals, PyTree]:
        everywhere = jax.tree.map(lambda y: broadcast(is_source, y), outputs.activation)
        inputs_m = index_leading(invariants.batch_inputs, microbatch)
        totals, dy = _vocab_parallel_loss(invariants, everywhere, inputs_m, microbatch, totals)
        own = jax.tree.map(lambda *xs: jnp.where(is_source, *xs), dy, outputs.cotangent)
        return totals, own

    totals, cotangent = update_if(
        microbatch >= 0,
        lambda state: loss(state[0]),
        (totals, outputs.cotangent),
        hint=stage_hint(invariants.tables.forward, invariants.num_stages - 1),
    )
    return totals, outputs._replace(cotangent=cotangent)


class BackwardTotals(NamedTuple):
    """What a B or I changes in place.

    Attributes:
        wgrad_residuals: [slots, ...] each, the buffers of what I leaves for W.
    """

    totals: Totals
    wgrad_residuals: list[jax.Array]


class BackwardOutputs(NamedTuple):
    """Results of a B or I: the cotangents of the input and of the state of earlier slices."""

    cotangent: PyTree
    past: list[jax.Array]


BackwardResults = tuple[BackwardTotals, BackwardOutputs]
"""What is changed in place, and what is stored or sent."""


def backward(tables: TickTables, *, completes_chunk: bool) -> Callable:
    """Returns `(invariants, work, buffers, BackwardTotals, zero outputs) -> BackwardResults`.

    It runs B, or I, or in a schedule with both the one of the table. A B alone completes a chunk.
    """
    if completes_chunk:
        return partial(_whole_backward, completes_chunk=True)
    kinds = {
        slot >= 0
        for microbatches, slots in zip(
            tables.backward.microbatch, tables.backward.wgrad_residuals_slot, strict=True
        )
        for microbatch, slot in zip(microbatches, slots, strict=True)
        if microbatch >= 0
    }

    def by_table(
        invariants: ScheduledInvariants,
        work: PhaseRow,
        buffers: ActivationBuffers,
        changed: BackwardTotals,
        zero_outputs: BackwardOutputs,
    ) -> BackwardResults:
        return cond(
            work.wgrad_residuals_slot >= 0,
            lambda changed: _input_backward(invariants, work, buffers, changed, zero_outputs),
            lambda changed: _whole_backward(invariants, work, buffers, changed, zero_outputs),
            changed,
            like=(changed, zero_outputs),
        )

    return by_table if len(kinds) == 2 else _input_backward if True in kinds else _whole_backward


def _whole_backward(
    invariants: ScheduledInvariants,
    work: PhaseRow,
    buffers: ActivationBuffers,
    changed: BackwardTotals,
    zero_outputs: BackwardOutputs,
    *,
    completes_chunk: bool = False,
) -> BackwardResults:
    """Runs B: gradients of the input and of the weights."""
    del zero_outputs
    stage, totals = _split_stage(invariants), changed.totals
    inputs, keys = _inputs_and_keys(invariants, work, buffers)
    w = invariants.gather.entries(totals.weight_state, work, False)
    residuals, cotangent = _stored_residuals(invariants, work, buffers)

    def add(gradient, finish):
        arguments = w, inputs, keys, residuals, cotangent, gradient, finish
        gradient, dx, dinputs = stage.backward(*arguments)
        return gradient, (dx, dinputs.earlier)

    weight_state, (dx, dpast) = invariants.gather.accumulate(
        totals.weight_state, work, add, completes_chunk
    )
    totals = totals._replace(weight_state=weight_state)
    totals = _with_embed_gradient(invariants, work, inputs.batch, dx, totals)
    return changed._replace(totals=totals), BackwardOutputs(
        dx, to_accum_dtype(jax.tree.leaves(dpast))
    )


def _input_backward(
    invariants: ScheduledInvariants,
    work: PhaseRow,
    buffers: ActivationBuffers,
    changed: BackwardTotals,
    zero_outputs: BackwardOutputs,
) -> BackwardResults:
    """Runs I: the gradient of the input, and residuals for W."""
    del zero_outputs
    stage, totals = _split_stage(invariants), changed.totals
    inputs, keys = _inputs_and_keys(invariants, work, buffers)
    w = invariants.gather.entries(totals.weight_state, work, False)
    into = entries_to_write(changed.wgrad_residuals, work.wgrad_residuals_slot)
    residuals, cotangent = _stored_residuals(invariants, work, buffers)
    dx, dinputs, stored = stage.input(w, inputs, keys, residuals, cotangent, into)
    totals = _with_embed_gradient(invariants, work, inputs.batch, dx, totals)
    return BackwardTotals(totals, stored), BackwardOutputs(
        dx, to_accum_dtype(jax.tree.leaves(dinputs.earlier))
    )


def weight(
    invariants: ScheduledInvariants,
    work: PhaseRow,
    buffers: ActivationBuffers,
    totals: Totals,
    *,
    completes_chunk: bool,
) -> Totals:
    """Runs W: adds the gradient of the weights."""
    stage = _split_stage(invariants)
    inputs, keys = _inputs_and_keys(invariants, work, buffers)
    w = invariants.gather.entries(totals.weight_state, work, False)
    residuals = entries_to_read(buffers.for_weight, work.residuals_for_weight_slot)
    wgrad_residuals = entries_to_read(buffers.wgrad_residuals, work.wgrad_residuals_slot)

    def add(gradient, finish):
        return stage.weight(w, inputs, keys, residuals, wgrad_residuals, gradient, finish), ()

    weight_state, _ = invariants.gather.accumulate(totals.weight_state, work, add, completes_chunk)
    return totals._replace(weight_state=weight_state)


def _split_stage(invariants: ScheduledInvariants) -> SplitBackward:
    assert invariants.stage is not None, "a schedule with backwards has a stage that is split"
    return invariants.stage


def _stored_residuals(
    invariants: ScheduledInvariants, work: PhaseRow, buffers: ActivationBuffers
) -> tuple[list[Any], tuple[StageOutputs, Aux]]:
    """Returns the residuals of F, or their entries, and the cotangent of its results."""
    early = entries_to_read(buffers.for_backward, work.residuals_for_backward_slot)
    late = entries_to_read(buffers.for_weight, work.residuals_for_weight_slot)
    residuals = merge_residuals(_split_stage(invariants), (early, late))
    dy = index_leading(buffers.cotangents, work.cotangent_slot)
    new = cotangent_of_new(invariants.past, buffers.past_cotangents, work)
    return residuals, (StageOutputs(dy, new), invariants.daux)


def _with_embed_gradient(
    invariants: ScheduledInvariants,
    work: PhaseRow,
    batch_inputs: PyTree,
    dx: PyTree,
    totals: Totals,
) -> Totals:
    """Adds the gradient of the embedding, if this is the backward of the first stage."""
    table = invariants.tables.backward
    if not visits_stage(table, 0):
        return totals
    add = partial(
        add_embed_gradient, invariants.model, invariants.boundary["embed"], batch_inputs, dx
    )
    group = embed_group(invariants.model)
    sums = totals.boundary[group]["embed"]
    sums = update_if(work.stage == 0, add, sums, hint=stage_hint(table, 0))
    of_group = totals.boundary[group] | {"embed": sums}
    return totals._replace(boundary=totals.boundary | {group: of_group})
