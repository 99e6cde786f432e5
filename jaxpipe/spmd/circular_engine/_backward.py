"""The backward of the circular pipeline on one rank: all ticks in reverse order.

It is written out instead of derived by JAX from the forward's loop, for four reasons: weights are
gathered again instead of stored, gradients are accumulated in float32 and reduce-scattered once per
repeat, residuals are written in place into one buffer with an entry per tick, and the buffers that
move microbatches between ranks are not stored for the backward.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from ...autodiff.backward import floating
from ...autodiff.staged_model import Aux, index_leading
from .._buffers import add_trees, put
from ..ranks import update_if, zeros_like
from ..weight_gather import WeightGather
from ._invariants import CircularInvariants, batch_inputs_and_keys, begins_repeat
from ._loop_phases import LoopPhase, block_of, phase_of, run_repeats, run_ticks
from ._residuals import Residuals, middle_repeat, read_first_half, read_second_half
from ._shape import (
    State,
    add_input,
    begins_on_rank_0,
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
    """Weights and gradients that a rank holds during a repeat of the backward.

    Attributes:
        done: Complete gradient of the repeat that the rank worked on before: the backward runs
            repeats in reverse order, so this is the repeat with the next higher index.
    """

    window: PyTree
    gradient: PyTree
    done: PyTree


class BackwardCarry(NamedTuple):
    """Values that a rank carries from tick to tick of the backward."""

    weight_state: WeightState
    cotangents: Cotangents


class BackwardBlockCarry(NamedTuple):
    """Values that a rank carries from repeat to repeat of the backward; `gradients` are complete.

    `prefetched` has the weights of the repeat below, () after repeat 0.
    """

    gradients: PyTree
    prefetched: PyTree
    ticks: BackwardCarry


def backward(
    invariants: CircularInvariants, residuals: Residuals, doutputs: PyTree, daux: Aux
) -> tuple[PyTree, PyTree, PyTree]:
    """Runs all ticks in reverse order; returns gradients of weights, inputs and batch inputs."""
    shape, gather = invariants.shape, invariants.gather
    final, half = shape.num_repeats - 1, middle_repeat(shape)
    cotangents = Cotangents(
        last_cotangent(doutputs, shape), zeros_like(floating(invariants.batch_inputs))
    )
    window, prefetched = _first_windows(gather, final, cotangents)
    zero_sum = gather.zeros(window)
    carry = BackwardCarry(WeightState(window, zero_sum, zero_sum), cotangents)
    run = _backward_loop if invariants.one_loop and final > 0 else _backward_blocks

    def run_half(read: Callable, repeats: range, prefetched: PyTree, ticks: BackwardCarry):
        start = BackwardBlockCarry(gather.zero_gradients(len(repeats)), prefetched, ticks)
        return run(invariants, partial(_backward_tick, invariants, read, daux), repeats, start)

    second = range(half, final + 1)
    done = run_half(partial(read_second_half, residuals, shape), second, prefetched, carry)
    gradients = done.gradients
    if half:
        read = partial(read_first_half, residuals, shape)
        done = run_half(read, range(half), done.prefetched, done.ticks)
        gradients = jax.tree.map(lambda *g: jnp.concatenate(g), done.gradients, gradients)
    cotangents = done.ticks.cotangents
    return gradients, cotangents.state.stream, cotangents.batch_inputs


def _first_windows(
    gather: WeightGather, final: int, cotangents: Cotangents
) -> tuple[PyTree, PyTree]:
    """Returns the window of the last repeat, and the prefetched weights of the one before it.

    Both are made only after the forward (`_after`). Otherwise the compiler would gather them during
    the forward and hold them until they are used.
    """
    last = _after(final, cotangents.state)
    window = gather.window(gather.prefetch(last), last)
    return window, gather.prefetch(_after(final - 1, cotangents.state)) if final else ()


def _backward_loop(
    invariants: CircularInvariants, tick: Callable, repeats: range, start: BackwardBlockCarry
) -> BackwardBlockCarry:
    """Returns what `_backward_blocks` does, after one loop; nothing is prefetched in it."""
    shape, gather = invariants.shape, invariants.gather
    phase = phase_of(shape, repeats)

    def tick_and_finish(carry: BackwardBlockCarry, t: Any) -> BackwardBlockCarry:
        ticks = tick(phase, start.prefetched, carry.ticks, t)

        def finish(gradients: PyTree) -> PyTree:
            done = gather.reduce_scatter(ticks.weight_state.done)
            return put(gradients, done, t // shape.num_microbatches - repeats[0])

        # All ranks agree when this is, so the branch may communicate.
        hint = hint_of_repeats(shape, phase.program)
        gradients = update_if(begins_on_rank_0(t, shape), finish, carry.gradients, hint=hint)
        return BackwardBlockCarry(gradients, start.prefetched, ticks)

    return run_ticks(tick_and_finish, start, phase, scan=True, reverse=True)


def _backward_blocks(
    invariants: CircularInvariants, tick: Callable, repeats: range, start: BackwardBlockCarry
) -> BackwardBlockCarry:
    """Runs the blocks of some repeats in reverse order.

    `start` has the weights of repeat `repeats[-1] - 1`, and zero gradients [len(repeats), ...].
    """
    shape, gather = invariants.shape, invariants.gather
    final = shape.num_repeats - 1
    lowest, highest = repeats[0], repeats[-1]
    in_blocks = range(max(lowest, 1), min(highest + 1, final))

    def ticks(phase: LoopPhase, prefetched: PyTree, carry: BackwardCarry) -> BackwardCarry:
        in_phase = partial(tick, phase, prefetched)
        return run_ticks(in_phase, carry, phase, scan=invariants.scan_ticks, reverse=True)

    def block(carry: BackwardBlockCarry, j: Any, phase: LoopPhase | None = None):
        # For the next block: no tick of this one reads it. Repeat 0 is gathered once too often.
        below = jnp.maximum(j - 2, 0)
        in_loop = phase is None and invariants.scan_repeats
        state = carry.ticks.cotangents.state
        prefetched_next = gather.prefetch(below if in_loop else _after(below, state))
        after = ticks(phase or block_of(shape, j, in_blocks), carry.prefetched, carry.ticks)
        done = gather.reduce_scatter(after.weight_state.done)
        gradients = put(carry.gradients, done, j - lowest)
        return BackwardBlockCarry(gradients, prefetched_next, after)

    blocks = start
    if 0 < final == highest:
        blocks = block(blocks, final, phase_of(shape, range(final, final + 1)))
    blocks = run_repeats(block, blocks, in_blocks[::-1], scan=invariants.scan_repeats)
    if lowest > 0:
        return blocks
    carry = ticks(phase_of(shape, range(1)), None, blocks.ticks)
    gradients = put(blocks.gradients, gather.reduce_scatter(carry.weight_state.gradient), 0)
    return BackwardBlockCarry(gradients, (), carry)


def _backward_tick(
    invariants: CircularInvariants,
    read: Callable[[Any], list[jax.Array]],
    daux: Aux,
    phase: LoopPhase,
    prefetched: PyTree | None,
    carry: BackwardCarry,
    t: Any,
) -> BackwardCarry:
    """Returns the carry before tick `t`.

    `prefetched` has the weights of the repeat with which ranks go on in the phase; None if no rank
    finishes a repeat in it.
    """
    gather, shape = invariants.gather, invariants.shape
    weight_state, (dstate, dbatch_inputs) = carry
    work = work_at(t, shape)
    dstate, dy = take_back(dstate, t, shape=shape, move=stream_move(t, shape, phase.program))
    daux_of_tick = jax.tree.map(lambda d: jnp.where(work.busy, d, 0), daux)
    batch_inputs, keys = batch_inputs_and_keys(invariants, work)
    w = gather.unshard(weight_state.window)
    dw, dx, ds = invariants.stage.backward(w, batch_inputs, keys, read(t), (dy, daux_of_tick))
    gradient = gather.accumulate(weight_state.gradient, dw)
    weight_state = weight_state._replace(gradient=gradient)
    if prefetched is not None:
        go_on = lambda s: _begin_repeat(gather, prefetched, work.repeat - 1, s)  # noqa: E731
        hint = hint_of_repeats(shape, phase.program)
        weight_state = update_if(begins_repeat(work), go_on, weight_state, hint=hint)
    ds = add_trees(index_leading(dbatch_inputs, work.microbatch), ds)
    dbatch_inputs = put(dbatch_inputs, ds, work.microbatch)
    dstate = add_input(dstate, dx, t, from_stream=work.from_stream)
    return BackwardCarry(weight_state, Cotangents(dstate, dbatch_inputs))


def _begin_repeat(
    gather: WeightGather, prefetched: PyTree, repeat: Any, weight_state: WeightState
) -> WeightState:
    """Returns what a rank holds when it goes on with `repeat`, after the repeat `repeat + 1`."""
    return WeightState(
        gather.window(prefetched, repeat), zeros_like(weight_state.gradient), weight_state.gradient
    )


def _after(index: Any, tree: PyTree) -> Int[Array, ""]:
    """Returns `index`, which XLA cannot use before `tree` is computed."""
    return lax.optimization_barrier((jnp.int32(index), jax.tree.leaves(tree)[0]))[0]
