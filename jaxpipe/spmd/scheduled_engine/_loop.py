"""The loops over ticks that run any schedule, forward and backward, seen by one rank.

A tick is F, then B or I, then W, each under a condition, so that a rank skips a phase in which it
has no work; then activations are sent to the ranks of the next stages and cotangents to those of
the stages before. Tables that `jaxpipe.schedules` makes from the schedule say what a rank runs in a
tick and in which slot of a buffer every array is stored. So a loop has one F and one B, whatever
the schedule, and buffers are as large as its peak. Most schedules run in one loop; where all
forwards run before all backwards, each kind has loops of its own (`lock_step.tick_loops`).

S ranks, v chunks on each, M microbatches. If stages are on several ranks, `stages` and `keys` have
the chunks that a rank stores, and the loop has those that it runs (`_weights`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree, Scalar, Shaped

from ...autodiff import Remat, StagedModel
from ...autodiff.backward import SplitBackward, floating, split_backward
from ...autodiff.staged_model import (
    Aux,
    from_leaves_by_path,
    index_leading,
    leaves_by_path,
    split_metrics,
    sum_scalars,
)
from ...schedules.lock_step import PhaseTable, TickTables, tick_loops
from .._boundary import sum_over_devices
from .._buffers import (
    allocate_buffer,
    cast_like,
    is_on_host,
    own_entries,
    put,
    to_accum_dtype,
    type_of,
)
from .._options import EngineOptions
from ..ranks import AXIS, execution_count_hint, pvary, update_if, zeros, zeros_like
from ..weight_gather import Gather
from . import _past
from ._boundary_sums import all_sums, zero_sums
from ._phases import (
    ActivationBuffers,
    BackwardOutputs,
    BackwardTotals,
    ForwardOutputs,
    ForwardTotals,
    ScheduledInvariants,
    Totals,
    backward,
    forward,
    loss_on_all_ranks,
    weight,
)
from ._residuals import (
    Residuals,
    fetch,
    merge_memories,
    split_by_memory,
    split_residuals,
    with_memories,
)
from ._rows import FIRST_CHUNK, Index, PhaseRow, TickRow, rows_of_rank
from ._weights import receive_copies, return_gradients, scheduled_weights


class ScheduledOptions(NamedTuple):
    """Options of the scheduled engine.

    Attributes:
        remat: Wraps a stage, and so decides which residuals F stores for B, I and W.
        engine: Options of the engine, of which a loop reads `vocab_parallel`.
    """

    tables: TickTables
    num_stages: int
    remat: Remat
    gather: Gather
    boundary_gather: Gather
    engine: EngineOptions


class TickCarry(NamedTuple):
    """Values that a rank carries from tick to tick."""

    buffers: ActivationBuffers
    totals: Totals


def rank_value_and_grad(
    model: StagedModel,
    stages: PyTree[Shaped[Array, "v ..."]],
    boundary: dict[str, PyTree],
    batch_inputs: PyTree[Shaped[Array, "M ..."]],
    keys: PyTree[Shaped[Array, "v ..."]],
    *,
    options: ScheduledOptions,
) -> tuple[tuple[tuple[Scalar, Aux], Aux], tuple[PyTree, dict[str, PyTree]]]:
    """Returns loss, metrics and gradients of the batch, as computed by one rank inside `stage`.

    Metrics that are arrays are those of a share of the microbatches, beside the loss.

    Over the batch axes, if there are any, each device runs on its own rows.
    """
    copies = options.tables.copies
    invariants, zero_outputs, carry = _prepare(model, options, stages, boundary, batch_inputs, keys)
    totals, sums = _all_ticks(options, invariants, zero_outputs, carry)
    # Over rows first, so that ranks sum the shards of a device.
    boundary_grads = options.boundary_gather.reduce_scatter(all_sums(totals.boundary))
    boundary_grads = lax.psum(boundary_grads, AXIS)
    stage_grads = return_gradients(invariants.gather.finish(sums), copies)
    return _summed(options, totals), (
        cast_like(stage_grads, stages),
        cast_like(boundary_grads, boundary),
    )


def rank_value(
    model: StagedModel,
    stages: PyTree[Shaped[Array, "v ..."]],
    boundary: dict[str, PyTree],
    batch_inputs: PyTree[Shaped[Array, "M ..."]],
    keys: PyTree[Shaped[Array, "v ..."]],
    *,
    options: ScheduledOptions,
) -> tuple[tuple[Scalar, Aux], Aux]:
    """Returns ((loss, metrics), metrics that are arrays), by a schedule that has only forwards."""
    prepared = _prepare(model, options, stages, boundary, batch_inputs, keys)
    invariants, zero_outputs, (_, totals) = prepared
    _, arrays = split_metrics(totals.loss_metrics)
    num_microbatches = jax.tree.leaves(batch_inputs)[0].shape[0]
    stored = num_microbatches * _num_bytes(zero_outputs.activation)
    if options.engine.vocab_parallel or _num_bytes(arrays) <= stored:
        return _summed(options, _all_ticks(options, *prepared)[0])
    # Such as logits, which are larger than y, of which they are computed. The loop stores y of
    # every microbatch, and each rank computes the loss of a share behind it; otherwise every rank
    # would hold the logits of the whole batch.
    last = replace(model, loss=lambda boundary, y, inputs: (jnp.zeros(()), leaves_by_path(y)))
    prepared = _prepare(last, options, stages, boundary, batch_inputs, keys)
    totals, _ = _all_ticks(options, *prepared)
    losses = _losses_of_share(invariants, own_entries(totals.loss_metrics))
    return sum_over_devices(options.gather, *losses, totals.stage_aux)


def _num_bytes(tree: PyTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _losses_of_share(
    invariants: ScheduledInvariants, outputs: dict[str, Shaped[Array, "n ..."]]
) -> tuple[Scalar, Aux]:
    """Computes the loss of this rank's share of the microbatches, one after the other."""
    model, batch_inputs = invariants.model, invariants.batch_inputs
    first = index_leading(batch_inputs, 0)
    x = jax.eval_shape(model.embed, invariants.boundary["embed"], first)
    y = from_leaves_by_path(outputs, x)
    count = jax.tree.leaves(batch_inputs)[0].shape[0]
    share = jax.tree.leaves(y)[0].shape[0]

    def step(_: tuple, entry: tuple[PyTree, Array]) -> tuple[tuple, tuple[Scalar, Aux]]:
        y_m, m = entry
        inputs_m = index_leading(batch_inputs, jnp.minimum(m, count - 1))
        value = model.loss(model.boundary(invariants.boundary), y_m, inputs_m)
        return (), jax.tree.map(lambda x: jnp.where(m < count, x, jnp.zeros_like(x)), value)

    ids = lax.axis_index(AXIS) * share + jnp.arange(share)
    return sum_scalars(lax.scan(step, (), (y, ids))[1])


def _all_ticks(
    options: ScheduledOptions,
    invariants: ScheduledInvariants,
    zero_outputs: ForwardOutputs,
    carry: TickCarry,
) -> tuple[Totals, PyTree]:
    """Runs all loops; returns totals, and sums of the gradients of all chunks.

    Residuals of a loop of forwards are kept for a loop of backwards; the last ones are read first.
    """
    gather, stored_residuals, sums = invariants.gather, [], {}
    for tables in tick_loops(options.tables, in_halves=options.gather.when == "repeat"):
        in_loop = invariants._replace(tables=tables)
        buffers, totals = carry
        takes_stored = tables.forward.is_idle
        residuals = stored_residuals.pop() if takes_stored else _allocate_residuals(in_loop)
        buffers = buffers._replace(for_backward=residuals[0], for_weight=residuals[1])
        if not tables.backward.is_idle:
            weight_state = gather.with_sums(totals.weight_state, tables)
            totals = totals._replace(weight_state=weight_state)
        carry = _run_loop(options, in_loop, zero_outputs, TickCarry(buffers, totals))
        buffers, totals = carry
        if tables.backward.is_idle:
            stored_residuals.append((buffers.for_backward, buffers.for_weight))
        else:
            weight_state, sums[tables.chunks.start] = gather.take_sums(totals.weight_state)
            totals = totals._replace(weight_state=weight_state)
    in_order = [sums[start] for start in sorted(sums)]
    return totals, jax.tree.map(lambda *parts: jnp.concatenate(parts), *in_order) if sums else ()


def _run_loop(
    options: ScheduledOptions,
    invariants: ScheduledInvariants,
    zero_outputs: ForwardOutputs,
    carry: TickCarry,
) -> TickCarry:
    def tick(carry: TickCarry, row: TickRow) -> tuple[TickCarry, None]:
        return _tick(invariants, zero_outputs, carry, row), None

    rows = rows_of_rank(invariants.tables)
    if options.engine.vocab_parallel:
        leaving = _loss_microbatches(invariants.tables, options.num_stages - 1)
        rows = rows._replace(loss_microbatches=leaving)
    return lax.scan(tick, carry, rows)[0]


def _loss_microbatches(tables: TickTables, last: int) -> tuple[Index, ...]:
    """Returns [num_ticks] the microbatch, or -1, that leaves each rank of the last stage."""
    microbatches, stages = np.asarray(tables.forward.microbatch), np.asarray(tables.forward.stage)
    leaving = np.where(stages == last, microbatches, -1).T
    return tuple(jnp.asarray(row, jnp.int32) for row in leaving if (row >= 0).any())


def _summed(options: ScheduledOptions, totals: Totals) -> tuple[tuple[Scalar, Aux], Aux]:
    """Returns ((loss, metrics) of the batch, metrics [n, ...] of a share of its microbatches)."""
    local = totals.loss, totals.loss_metrics, totals.stage_aux
    value, arrays = sum_over_devices(options.gather, *local)
    return value, own_entries(arrays)


def _prepare(
    model: StagedModel,
    options: ScheduledOptions,
    stages: PyTree,
    boundary: dict[str, PyTree],
    batch_inputs: PyTree,
    keys: PyTree,
) -> tuple[ScheduledInvariants, ForwardOutputs, TickCarry]:
    """Traces and splits the stage; returns (invariants, zero outputs of an F, carry)."""
    stages, keys = receive_copies((stages, keys), options.tables.copies)
    gather = scheduled_weights(options.gather, stages, options.tables)
    has_backward = options.tables.num_slots["cotangents"] > 0
    gathered = options.boundary_gather.cast_and_unshard(boundary)
    # Only the types of these arguments are used, to trace the stage.
    first_inputs = index_leading(batch_inputs, 0)
    x = jax.tree.map(pvary, model.embed(gathered["embed"], first_inputs))
    weight_state = gather.init()
    w = gather.unshard(weight_state, FIRST_CHUNK, True)
    first_keys = index_leading(keys, 0)
    past = _past.past_layout(model, options.tables.num_slices, w, x, first_inputs, first_keys)
    one_state = [zeros(shape, lead=(1,)) for shape in past.shapes]
    examples = w, x, _past.slice_inputs(past, first_inputs, one_state, FIRST_CHUNK), first_keys
    run_stage = _past.stage_of_pieces(model, past)
    remat = _past.remat_of_pieces(options.remat, past)
    split = split_backward(remat(run_stage), *examples) if has_backward else None
    outputs, aux_shapes = jax.eval_shape(run_stage, *examples)
    loss_shape, metric_shapes = jax.eval_shape(
        model.loss, model.boundary(gathered), x, first_inputs
    )
    zero_aux = {name: zeros(s) for name, s in aux_shapes.items()}
    daux = {name: jnp.full_like(s, name == "loss") for name, s in zero_aux.items()}
    loss_stage = options.num_stages if options.engine.vocab_parallel else options.num_stages - 1
    invariants = ScheduledInvariants(
        model=model,
        num_stages=options.num_stages,
        loss_stage=loss_stage,
        tables=options.tables,
        past=past,
        run_stage=run_stage,
        stage=split,
        residuals=_residual_types(split, examples) if split else ([], []),
        gather=gather,
        boundary=gathered,
        batch_inputs=batch_inputs,
        keys=keys,
        daux=daux,
    )
    totals = Totals(
        zeros(loss_shape),
        _zero_metrics(metric_shapes, jax.tree.leaves(batch_inputs)[0].shape[0]),
        zero_aux,
        weight_state,
        zero_sums(model, gathered, options.engine.vocab_parallel) if has_backward else {},
    )
    buffers = _allocate_buffers(invariants, examples)
    _, on_host = split_by_memory(invariants.residuals)
    y, dy = zeros_like(x), zeros_like(floating(x)) if has_backward else ()
    one_of_each = jax.tree.map(lambda a: index_leading(allocate_buffer(a, 1), 0), on_host)
    zero_outputs = ForwardOutputs(y, dy, zeros_like(one_of_each), zeros_like(outputs.new))
    return invariants, zero_outputs, TickCarry(buffers, totals)


def _zero_metrics(shapes: PyTree, num_microbatches: int) -> Aux:
    """Returns sums of scalars, and [M, ...] for arrays."""
    scalars, arrays = split_metrics(shapes)
    return zeros_like(scalars) | {
        name: zeros(shape, lead=(num_microbatches,)) for name, shape in arrays.items()
    }


def _residual_types(stage: SplitBackward, examples: tuple) -> Residuals:
    """Returns the types of what F stores, in the memory where it is stored."""
    w, x, inputs, keys = examples
    stored = jax.make_jaxpr(lambda x: stage.forward(w, x, inputs, keys)[1])(x).out_avals
    return split_residuals(stage, with_memories(stage, stored))


def _allocate_buffers(invariants: ScheduledInvariants, examples: tuple) -> ActivationBuffers:
    """Allocates all buffers but those of residuals."""
    w, x, inputs, keys = examples
    past, stage = inputs.earlier, invariants.stage
    allocate = partial(_allocate, invariants.tables.num_slots)
    buffers = ActivationBuffers(
        inputs=allocate(x, "inputs"),
        cotangents=(),
        for_backward=[],
        for_weight=[],
        wgrad_residuals=[],
        past=allocate(past, "past"),
        past_cotangents=[],
    )
    if stage is None:
        return buffers

    def wgrad_residuals(x):
        out, stored = stage.forward(w, x, inputs, keys)
        return stage.input(w, inputs, keys, stored, floating(out))[2]

    return buffers._replace(
        cotangents=allocate(floating(x), "cotangents"),
        wgrad_residuals=allocate(jax.make_jaxpr(wgrad_residuals)(x).out_avals, "wgrad_residuals")
        if invariants.tables.num_slots["wgrad_residuals"]
        else [],
        past_cotangents=allocate(
            to_accum_dtype(jax.tree.leaves(floating(past))), "past_cotangents"
        ),
    )


def _allocate_residuals(invariants: ScheduledInvariants) -> Residuals:
    """Allocates the buffers of residuals of a loop."""
    early, late = invariants.residuals
    num_slots = invariants.tables.num_slots
    return (
        _allocate(num_slots, early, "residuals_for_backward"),
        _allocate(num_slots, late, "residuals_for_weight"),
    )


def _allocate(num_slots: dict[str, int], tree: PyTree, name: str) -> PyTree:
    """Allocates a buffer of so many slots for every leaf; one on the host has one more."""
    slots = max(1, num_slots[name])
    return jax.tree.map(lambda a: allocate_buffer(type_of(a), slots + is_on_host(a)), tree)


def _tick(
    invariants: ScheduledInvariants,
    zero_outputs: ForwardOutputs,
    carry: TickCarry,
    row: TickRow,
) -> TickCarry:
    """Runs one tick, without the phases in which no rank has work in any tick of the loop."""
    if not invariants.tables.forward.is_idle:
        carry = _tick_forward(invariants, zero_outputs, carry, row)
    if not invariants.tables.backward.is_idle:
        carry = _tick_backward(invariants, zero_outputs, carry, row)
    return carry


def _tick_forward(
    invariants: ScheduledInvariants,
    zero_outputs: ForwardOutputs,
    carry: TickCarry,
    row: TickRow,
) -> TickCarry:
    """Runs F.

    `zero_outputs` is zeros like its results. Totals and the buffers of residuals are operands of
    conditionals: a branch changes them in place, and JAX forwards what it does not change. Of what
    is stored or sent by all, a branch returns the new entry.
    """
    (buffers, totals), tables = carry, invariants.tables
    totals = totals._replace(
        weight_state=invariants.gather.prefetch(totals.weight_state, tables, row.forward, True)
    )
    on_device, on_host = split_by_memory((buffers.for_backward, buffers.for_weight))
    changed = ForwardTotals(totals, on_device)
    (totals, on_device), outputs = update_if(
        row.forward.microbatch >= 0,
        lambda state: forward(invariants, row.forward, buffers, state[0], zero_outputs),
        (changed, zero_outputs),
        hint=execution_count_hint(tables.forward.microbatch),
    )
    on_device = _keep_readers_out(on_device)
    for microbatch in row.loss_microbatches:
        totals, outputs = loss_on_all_ranks(invariants, row.forward, outputs, microbatch, totals)
    buffers = buffers._replace(
        inputs=_hand_over(buffers.inputs, outputs.activation, row.activation_arrivals),
        past=_past.write_past(invariants.past, buffers.past, outputs.new, row.forward),
    )
    if invariants.stage is None:
        return TickCarry(buffers, totals)
    slots = row.forward.residuals_for_backward_slot, row.forward.residuals_for_weight_slot
    early, late = map(_store, on_host, outputs.on_host, slots)
    for_backward, for_weight = merge_memories(on_device, (early, late))
    buffers = buffers._replace(
        cotangents=_store(buffers.cotangents, outputs.cotangent, row.forward.cotangent_slot),
        for_backward=for_backward,
        for_weight=for_weight,
    )
    return TickCarry(buffers, totals)


def _tick_backward(
    invariants: ScheduledInvariants,
    zero_outputs: ForwardOutputs,
    carry: TickCarry,
    row: TickRow,
) -> TickCarry:
    """Runs B or I, then W."""
    (buffers, totals), tables, work = carry, invariants.tables, row.backward
    gather = invariants.gather
    zero_past = index_leading(buffers.past_cotangents, 0)
    zero_backward = BackwardOutputs(zero_outputs.cotangent, zero_past)
    weight_state = gather.prefetch(totals.weight_state, tables, work, False)
    totals = totals._replace(weight_state=weight_state)
    changed = BackwardTotals(totals, buffers.wgrad_residuals)
    fetched = buffers._replace(
        for_backward=fetch(buffers.for_backward, work.residuals_for_backward_slot),
        for_weight=fetch(buffers.for_weight, work.residuals_for_weight_slot),
    )

    def run_backward(state: tuple, *, completes_chunk: bool) -> tuple:
        run = backward(tables, completes_chunk=completes_chunk)
        return run(invariants, work, fetched, state[0], zero_backward)

    apart = gather.scatters_last
    (totals, wgrad_residuals), outputs = _run_adding(
        tables.backward, work, run_backward, (changed, zero_backward), apart=apart
    )
    weight_state = gather.reduce_scatter(totals.weight_state, tables, work)
    totals = totals._replace(weight_state=weight_state)
    buffers = buffers._replace(
        cotangents=_hand_over(buffers.cotangents, outputs.cotangent, row.cotangent_arrivals),
        wgrad_residuals=_keep_readers_out(wgrad_residuals),
        past_cotangents=_past.add_past_cotangents(
            invariants.past, buffers.past_cotangents, outputs.past, work
        ),
    )
    if tables.num_slots["wgrad_residuals"]:
        slot = row.weight.residuals_for_weight_slot
        fetched = buffers._replace(for_weight=fetch(buffers.for_weight, slot))
        run_weight = partial(weight, invariants, row.weight, fetched)
        totals = _run_adding(tables.weight, row.weight, run_weight, totals, apart=apart)
    return TickCarry(buffers, totals)


def _keep_readers_out(buffers: PyTree) -> PyTree:
    """Returns buffers that a conditional changes in place, for readers after it."""
    # Or XLA moves what reads a buffer into the branches, which then return it twice: it copied what
    # I leaves for W three times in a tick, a fifth of a step (libtpu 0.0.48.1).
    # One by one: a barrier for all would make them vary over the same axes.
    return jax.tree.map(lax.optimization_barrier, buffers)


def _run_adding(
    table: PhaseTable, work: PhaseRow, run: Callable, state: PyTree, *, apart: bool
) -> PyTree:
    """Runs B, I or W where its rank has one: `run(state, completes_chunk=...)`.

    `apart`: what completes the gradients of a chunk has a branch of its own.
    """
    kinds = {entry for ranks in table.completes_chunk for entry in ranks if entry >= 0}
    if not apart or kinds == {0}:  # such as I: what completes a chunk is in another phase
        hint = execution_count_hint(table.microbatch)
        return update_if(
            work.microbatch >= 0, partial(run, completes_chunk=False), state, hint=hint
        )
    for kind in sorted(kinds):
        hint = execution_count_hint(table.completes_chunk, lambda entry, kind=kind: entry == kind)
        run_kind = partial(run, completes_chunk=kind == 1)
        state = update_if(work.completes_chunk == kind, run_kind, state, hint=hint)
    return state


def _hand_over(buffers: PyTree, x: PyTree, arrivals: dict[int, Index]) -> PyTree:
    """Sends `x` by every offset of ranks in `arrivals`, and stores what is received in its slot."""
    ranks = lax.axis_size(AXIS)
    for offset, slot in arrivals.items():
        pairs = [(r, (r + offset) % ranks) for r in range(ranks)]
        buffers = _store(buffers, lax.ppermute(x, AXIS, pairs) if offset else x, slot)
    return buffers


def _store(buffers: PyTree, new: PyTree, slot: Index) -> PyTree:
    """Writes `new` to a slot of every buffer, unless `slot` is negative."""

    def store(buffer: jax.Array, new: jax.Array) -> jax.Array:
        if is_on_host(buffer):  # no `where` in host memory: the last slot is never read
            new = jax.device_put(new, jax.memory.Space.Host)
            return put(buffer, new, jnp.where(slot >= 0, slot, buffer.shape[0] - 1))
        return put(buffer, jnp.where(slot >= 0, new, index_leading(buffer, slot)), slot)

    return jax.tree.map(store, buffers, new)
