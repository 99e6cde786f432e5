"""The two passes of the circular pipeline on one rank: all ticks forward, and all in reverse order.

The backward is written out instead of derived by JAX from the forward's loop, for four reasons:
weights are gathered again instead of stored, gradients are accumulated in float32 and
reduce-scattered once per repeat, residuals are written in place into one buffer with an entry per
tick, and the buffers that move microbatches between ranks are not stored for the backward.

With many repeats the earlier and the later half of the repeats have loops and buffers of their own:
the backward frees the buffers of the later half before it has filled the gradients of the earlier
half, so the peaks of residuals and gradients do not coincide.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree, Shaped

from ...autodiff.backward import floating
from ...autodiff.staged_model import Aux, index_leading
from ...ir.graph import pvary_like
from ...ir.transforms import first_parts, with_first_parts
from ...schedules.lock_step import middle_chunk
from .._buffers import add_trees, allocate_buffer, cast_like, over_leading, put
from ..ranks import AXIS, update_if, zeros_like
from ..weight_gather import only_after
from ._invariants import (
    CircularInvariants,
    CircularOptions,
    Stage,
    batch_inputs_and_keys,
    begins_repeat,
    prepare,
)
from ._loop_phases import LoopPhase, phase_of, run_all_ticks
from ._shape import (
    PipelineShape,
    State,
    TickIndex,
    TickWork,
    add_input,
    first_state,
    hand_over,
    hint_of_entries,
    hint_of_repeats,
    last_cotangent,
    next_input,
    realign,
    stream_move,
    take_back,
    work_at,
)

Buffers = list[jax.Array]
"""[ticks, ...] residuals of the ticks of some repeats; empty if none are stored."""


class ForwardCarry(NamedTuple):
    """Values that a rank carries from tick to tick.

    `window` has the weights of its repeat, and `prefetched` those of the next as far as they are
    gathered. `residuals` are those of the repeats of a loop.
    """

    window: PyTree
    prefetched: PyTree
    state: State
    aux: Aux
    residuals: Buffers


def forward_rank(
    stage: Stage,
    options: CircularOptions,
    save_residuals: bool,
    weights: PyTree[Shaped[Array, "R ..."]],
    inputs: PyTree[Shaped[Array, "n ..."]],
    batch_inputs: PyTree[Shaped[Array, "M ..."]],
    keys: PyTree[Shaped[Array, "R ..."]],
) -> tuple[tuple[PyTree, Aux], list[Buffers]]:
    """Sends every microbatch through all stages, as one rank inside the axis `stage`.

    Returns ((outputs like `inputs`, aux summed over all stages and microbatches), residuals of this
    rank, for each half of the repeats).
    """
    invariants, aux = prepare(stage, options, weights, inputs, batch_inputs, keys)
    (outputs, totals), residuals = forward(invariants, inputs, aux, save_residuals=save_residuals)
    return (outputs, lax.psum(totals, (AXIS, *options.gather.batch_axes))), residuals


def backward_rank(
    stage: Stage,
    options: CircularOptions,
    weights: PyTree[Shaped[Array, "R ..."]],
    inputs: PyTree,
    batch_inputs: PyTree[Shaped[Array, "M ..."]],
    keys: PyTree[Shaped[Array, "R ..."]],
    residuals: list[Buffers],
    doutputs: PyTree,
    daux: Aux,
) -> tuple[PyTree, PyTree, PyTree]:
    """Returns the gradients of weights, inputs and batch inputs; None for leaves that are integers.

    Takes the arguments of `forward_rank` (of `inputs` only the shapes are read), the residuals
    that it returned, and the cotangents of its outputs and aux.
    """
    invariants, _ = prepare(stage, options, weights, inputs, batch_inputs, keys)
    gradients, dinputs, dbatch_inputs = backward(invariants, residuals, doutputs, daux)
    return cast_like(gradients, floating(weights)), dinputs, lax.psum(dbatch_inputs, AXIS)


def forward(
    invariants: CircularInvariants,
    inputs: PyTree[Shaped[Array, "n ..."]],
    aux_shapes: PyTree,
    *,
    save_residuals: bool,
) -> tuple[tuple[PyTree, Aux], list[Buffers]]:
    """Runs all ticks of the forward on one rank; nothing is stored unless residuals are saved."""
    shape, gather = invariants.shape, invariants.gather
    state, aux = first_state(inputs, shape), zeros_like(aux_shapes)
    prefetched = gather.prefetch(0)
    carry = ForwardCarry(gather.window(prefetched, 0), prefetched, state, aux, [])
    avals, stored = _residuals_of_tick(invariants, inputs) if save_residuals else [], []
    for repeats in _halves_of_repeats(shape) if save_residuals else [range(shape.num_repeats)]:
        carry = carry._replace(residuals=_allocate_residuals(avals, shape, repeats))
        tick = partial(_forward_tick, invariants, repeats)
        carry = run_all_ticks(tick, carry, shape, repeats, options=invariants.options.engine)
        stored.append(carry.residuals)
    return (realign(carry.state.stream, shape), carry.aux), stored


def _forward_tick(
    invariants: CircularInvariants, repeats: range, phase: LoopPhase, carry: ForwardCarry, t: Any
) -> ForwardCarry:
    """Returns the carry after tick `t`, in a loop over `repeats`."""
    gather, shape = invariants.gather, invariants.shape
    window, prefetched, state, aux, residuals = carry
    work = work_at(t, shape)
    if shape.num_repeats > 1:
        begin = lambda _: gather.window(prefetched, work.repeat)  # noqa: E731
        hint = hint_of_repeats(shape, phase.program)
        window = update_if(begins_repeat(work), begin, window, hint=hint)
    x = next_input(state, t, from_stream=work.from_stream)
    # XLA:TPU would move a copy of the stream if it could move it before the input is read.
    x, stream = lax.optimization_barrier((x, state.stream))
    state = state._replace(stream=stream)
    batch_inputs, keys = batch_inputs_and_keys(invariants, work)
    (y, new_aux), new = invariants.stage.forward(gather.unshard(window), x, batch_inputs, keys)
    if shape.num_repeats > 1:
        next_repeat = jnp.clip(work.repeat + 1, 0, shape.num_repeats - 1)
        part = work.microbatch, shape.num_microbatches
        # It arrives before the first part of `y` is sent: later, no product is left to hide it.
        first = first_parts(y)
        prefetched, first = gather.prefetch_part(prefetched, next_repeat, *part, (), first)
        y = with_first_parts(y, first)
    aux = jax.tree.map(lambda a, b: a + jnp.where(work.busy, b, 0), aux, new_aux)
    residuals = _store_residuals(residuals, new, _entry_of(t, shape, repeats))
    move = stream_move(t, shape, phase.program)
    state = hand_over(state, y, t, move=move)
    return ForwardCarry(window, prefetched, state, aux, residuals)


def _residuals_of_tick(invariants: CircularInvariants, inputs: PyTree) -> list[Any]:
    """Returns the abstract values of the residuals of a tick."""
    gather = invariants.gather

    def residuals(inputs):
        w = gather.unshard(gather.window(gather.prefetch(0), 0))
        batch_inputs, keys = batch_inputs_and_keys(invariants, work_at(0, invariants.shape))
        return invariants.stage.forward(w, index_leading(inputs, 0), batch_inputs, keys)[1]

    return jax.make_jaxpr(residuals)(inputs).out_avals


class Cotangents(NamedTuple):
    """Cotangents of the activation buffers, and of `batch_inputs` summed over the ticks so far."""

    state: State
    batch_inputs: PyTree


class WeightState(NamedTuple):
    """Weights and gradients of a rank. The backward runs repeats in reverse order.

    Attributes:
        window: The weights of the repeat that the rank works on.
        prefetched: The weights of the next lower repeat, as far as they are gathered.
        gradient: The sum of the gradients of the repeat so far.
        done: The complete gradient of the next higher repeat.
        gradients: [repeats, ...] gradients as they are stored, as far as they are scattered.
    """

    window: PyTree
    prefetched: PyTree
    gradient: PyTree
    done: PyTree
    gradients: PyTree


class BackwardCarry(NamedTuple):
    """Values that a rank carries from tick to tick of the backward."""

    weight_state: WeightState
    cotangents: Cotangents


def backward(
    invariants: CircularInvariants, residuals: list[Buffers], doutputs: PyTree, daux: Aux
) -> tuple[PyTree, PyTree, PyTree]:
    """Runs all ticks in reverse order; returns gradients of weights, inputs and batch inputs."""
    shape, gather = invariants.shape, invariants.gather
    cotangents = Cotangents(
        last_cotangent(doutputs, shape), zeros_like(floating(invariants.batch_inputs))
    )
    first_cotangent = jax.tree.leaves(cotangents.state)[0]
    last = only_after(first_cotangent, jnp.int32(shape.num_repeats - 1))
    prefetched = gather.prefetch(last)
    window = gather.window(prefetched, last)
    zero_sum = gather.zeros(window)
    carry = BackwardCarry(WeightState(window, prefetched, zero_sum, zero_sum, ()), cotangents)

    half_gradients, halves = [], _halves_of_repeats(shape)
    for repeats, half_residuals in zip(halves[::-1], residuals[::-1], strict=True):
        weight_state = carry.weight_state._replace(gradients=gather.zero_gradients(len(repeats)))
        carry = carry._replace(weight_state=weight_state)
        if half_gradients:
            # Scattered while these zeros are written. XLA would scatter it after all ticks.
            waiting = half_gradients[-1], carry.cotangents
            carry = carry._replace(cotangents=lax.optimization_barrier(waiting)[1])
        tick = partial(_backward_tick, invariants, half_residuals, daux, repeats)
        options = invariants.options.engine
        carry = run_all_ticks(tick, carry, shape, repeats, options=options, reverse=True)
        carry = _scatter_last(invariants, carry)
        half_gradients.append(carry.weight_state.gradients)
    gradients = jax.tree.map(lambda *g: jnp.concatenate(g), *half_gradients[::-1])
    gradients = over_leading(gather.finish, gradients)
    cotangents = carry.cotangents
    return gradients, cotangents.state.stream, cotangents.batch_inputs


def _scatter_last(invariants: CircularInvariants, carry: BackwardCarry) -> BackwardCarry:
    """Returns the carry with the gradient of the lowest repeat scattered, of which no tick did."""
    state = carry.weight_state
    total = state.done if invariants.shape.num_repeats > 1 else state.gradient
    gradients = put(state.gradients, invariants.gather.reduce_scatter(total), 0)
    return carry._replace(weight_state=state._replace(gradients=gradients))


def _backward_tick(
    invariants: CircularInvariants,
    residuals: Buffers,
    daux: Aux,
    repeats: range,
    phase: LoopPhase,
    carry: BackwardCarry,
    t: Any,
) -> BackwardCarry:
    """Returns the carry before tick `t`, in a loop over `repeats`."""
    gather, shape = invariants.gather, invariants.shape
    weight_state, (dstate, dbatch_inputs) = carry
    work = work_at(t, shape)
    dstate, dy = take_back(dstate, t, move=stream_move(t, shape, phase.program))
    daux_of_tick = jax.tree.map(lambda d: jnp.where(work.busy, d, 0), daux)
    batch_inputs, keys = batch_inputs_and_keys(invariants, work)

    def backward(*arguments: PyTree) -> tuple[PyTree, PyTree]:
        dw, *cotangents = invariants.stage.backward(*arguments)
        return dw, cotangents

    saved = index_leading(residuals, _entry_of(t, shape, repeats))
    arguments = gather.unshard(weight_state.window), batch_inputs, keys, saved, (dy, daux_of_tick)
    gradient, (dx, ds) = gather.accumulate(weight_state.gradient, backward, *arguments)
    weight_state = weight_state._replace(gradient=gradient)
    if shape.num_repeats > 1:
        hint = hint_of_repeats(shape, phase.program)
        weight_state, dx = _next_weights(invariants, repeats, work, weight_state, hint, dy, dx)
    ds = add_trees(index_leading(dbatch_inputs, work.microbatch), ds)
    dbatch_inputs = put(dbatch_inputs, ds, work.microbatch)
    hint = hint_of_entries(shape, phase.program)
    dstate = add_input(dstate, dx, t, work=work, hint=hint)
    return BackwardCarry(weight_state, Cotangents(dstate, dbatch_inputs))


def _next_weights(
    invariants: CircularInvariants,
    repeats: range,
    work: TickWork,
    state: WeightState,
    hint: str,
    dy: PyTree,
    dx: PyTree,
) -> tuple[WeightState, PyTree]:
    """Returns the weights and gradients that a rank holds after its work of a tick, and `dx`.

    In every tick a part of the gradient that is complete is scattered, and a part of the weights
    that come next is gathered. In bubbles, and before the first gradient is complete, parts are
    written that are written again.
    """
    # They are sent when `dy` is there, for which most products wait. XLA's scheduler puts transfers
    # that wait for less in front of it, where few products are left to hide them.
    gather, part = invariants.gather, (work.microbatch, invariants.shape.num_microbatches)
    below = jnp.maximum(work.repeat - 1, 0)
    done = jnp.clip(work.repeat + 1, repeats[0], repeats[-1]) - repeats[0]
    gradients, scattered, dx = gather.reduce_scatter_part(
        state.gradients, done, state.done, *part, dy, dx
    )
    prefetched, dx = gather.prefetch_part(state.prefetched, below, *part, dy, dx)

    def begin(held: tuple[PyTree, PyTree, PyTree]) -> tuple[PyTree, PyTree, PyTree]:
        _, gradient, _ = held
        return gather.window(prefetched, work.repeat - 1), zeros_like(gradient), gradient

    held = state.window, state.gradient, scattered
    window, gradient, done = update_if(begins_repeat(work), begin, held, hint=hint)
    return WeightState(window, prefetched, gradient, done, gradients), dx


def _halves_of_repeats(shape: PipelineShape) -> list[range]:
    """Returns the repeats that have buffers of their own, in the order of the forward."""
    middle, end = middle_chunk(shape.num_repeats), shape.num_repeats
    return [repeats for repeats in (range(middle), range(middle, end)) if repeats]


def num_entries(shape: PipelineShape) -> list[int]:
    """Returns the entries of the buffers of each half."""
    return [phase_of(shape, repeats).length for repeats in _halves_of_repeats(shape)]


def _allocate_residuals(avals: list[Any], shape: PipelineShape, repeats: range) -> Buffers:
    """Allocates a buffer for each abstract value of a residual, in its memory space."""
    return [allocate_buffer(x, phase_of(shape, repeats).length) for x in avals]


def _entry_of(t: TickIndex, shape: PipelineShape, repeats: range) -> TickIndex:
    """Returns the entry of tick `t` in the buffers of `repeats`."""
    return t - phase_of(shape, repeats).start


def _store_residuals(buffers: Buffers, new: list[jax.Array], entry: TickIndex) -> Buffers:
    """Writes the residuals of a tick to their entry; without buffers nothing is written."""
    pairs = zip(buffers, new, strict=bool(buffers))
    return put(buffers, [pvary_like(jax.typeof(buffer), x) for buffer, x in pairs], entry)
