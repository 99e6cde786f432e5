"""The backward of the circular pipeline on one rank: all ticks in reverse order.

It is written out instead of derived by JAX from the forward's loop, for four reasons: weights are
gathered again instead of stored, gradients are accumulated in float32 and reduce-scattered once per
repeat, residuals are written in place into one buffer with an entry per tick, and the buffers that
move microbatches between ranks are not stored for the backward.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from ...autodiff.backward import floating
from ...autodiff.staged_model import Aux, index_leading
from .._buffers import add_trees, over_leading, put
from ..ranks import update_if, zeros_like
from ..weight_gather import only_after
from ._invariants import CircularInvariants, batch_inputs_and_keys, begins_repeat
from ._loop_phases import LoopPhase, run_all_ticks
from ._residuals import Buffers, entry_of, halves_of_repeats
from ._shape import (
    State,
    TickWork,
    add_input,
    hint_of_entries,
    hint_of_repeats,
    last_cotangent,
    stream_move,
    take_back,
    work_at,
)


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

    half_gradients, halves = [], halves_of_repeats(shape)
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

    saved = index_leading(residuals, entry_of(t, shape, repeats))
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
