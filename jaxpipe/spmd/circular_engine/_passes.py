"""The circular pipeline of one rank: all ticks forward, and the entry to its backward."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree, Shaped

from ...autodiff.backward import floating
from ...autodiff.staged_model import Aux, index_leading
from ...ir.transforms import first_parts, with_first_parts
from .._buffers import cast_like
from ..ranks import AXIS, update_if, zeros_like
from ._backward import backward
from ._invariants import (
    CircularInvariants,
    CircularOptions,
    Stage,
    batch_inputs_and_keys,
    begins_repeat,
    prepare,
)
from ._loop_phases import LoopPhase, run_all_ticks
from ._residuals import Buffers, allocate, entry_of, halves_of_repeats, store
from ._shape import (
    State,
    first_state,
    hand_over,
    hint_of_repeats,
    next_input,
    realign,
    stream_move,
    work_at,
)


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
    for repeats in halves_of_repeats(shape) if save_residuals else [range(shape.num_repeats)]:
        carry = carry._replace(residuals=allocate(avals, shape, repeats))
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
    residuals = store(residuals, new, entry_of(t, shape, repeats))
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
