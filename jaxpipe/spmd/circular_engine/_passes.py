"""The circular pipeline of one rank: all ticks forward, and all ticks backward.

The backward is written out instead of derived by JAX from the forward's loop, for four reasons:
weights are gathered again instead of stored, gradients are accumulated in float32 and
reduce-scattered once per repeat, residuals are written in place into one buffer with an entry per
tick, and the buffers that move microbatches between ranks are not stored for the backward.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree

from ...autodiff.backward import Pullback, floating, pullback
from ...autodiff.staged_model import Aux, fold_in_microbatch, index_leading
from .._buffers import cast_like, put
from ..ranks import AXIS, zeros_like
from ..weight_gather import Gather, RepeatGather, identity, repeat_gather
from ._loop_phases import LoopPhase, drain, single_repeat, steady, warmup
from ._residuals import Residuals, allocate, middle_repeat, read_first_half, read_second_half, store
from ._shape import (
    PipelineShape,
    State,
    TickWork,
    add_input,
    check_circular,
    first_state,
    hand_over,
    last_cotangent,
    next_input,
    realign,
    take_back,
    work_at,
)

Stage = Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, Aux]]


class CircularInvariants(NamedTuple):
    """Loop invariants: the values that a tick reads and does not change, on one rank.

    Attributes:
        shape: S, R, M and d.
        stage: The stage, forward and backward.
        gather: Functions that gather this rank's weights and reduce-scatter their gradients.
        batch_inputs: [M, ...] leaves.
        keys: [R, ...] leaves, or ().
        scan: Whether the repeats between the first and the last run in a `lax.scan`.
    """

    shape: PipelineShape
    stage: Pullback
    gather: RepeatGather
    batch_inputs: PyTree
    keys: PyTree
    scan: bool


class Cotangents(NamedTuple):
    """Carry of the backward's loop: the cotangents of `State` and of `batch_inputs`."""

    state: State
    batch_inputs: PyTree


class WeightState(NamedTuple):
    """Weights and gradients that a rank holds during a repeat of the backward.

    Attributes:
        window: Weights of the repeat.
        gradient: Gradient of these weights, summed over the ticks so far.
        done: Complete gradient of the repeat that the rank worked on before: the backward runs
            repeats in reverse order, so this is the repeat with the next higher index.
    """

    window: PyTree
    gradient: PyTree
    done: PyTree


class CircularOptions(NamedTuple):
    """Options of a circular pipeline.

    Attributes:
        delay: Whether results are handed over one tick late, to overlap transfer and computation.
        remat: Wraps a stage, and so decides which residuals a tick stores for the backward.
        gather: When and how weights are gathered.
        scan_repeats: Whether repeats run in a `lax.scan` or are unrolled.
    """

    delay: bool
    remat: Callable[[Callable], Callable]
    gather: Gather
    scan_repeats: bool


def forward_rank(
    stage: Stage,
    options: CircularOptions,
    save_residuals: bool,
    weights: PyTree,
    inputs: PyTree,
    batch_inputs: PyTree,
    keys: PyTree,
) -> tuple[tuple[PyTree, Aux], Residuals]:
    """Sends every microbatch through all stages. Runs on one rank inside the axis `stage`.

    Args:
        stage: `(weights of one stage, x, batch_inputs of one microbatch, its keys) -> (y, aux)`.
        options: The options of the pipeline.
        save_residuals: Whether residuals are stored for a backward.
        weights: [R, ...] leaves, this rank's stages.
        inputs: [n, ...] leaves, this rank's microbatches, `rank * n` to `(rank + 1) * n - 1`.
        batch_inputs: [M, ...] leaves, the same on every rank.
        keys: [R, ...] leaves, this rank's dropout keys, or ().

    Returns:
        ((outputs like `inputs`, aux summed over all stages and microbatches), residuals of this
        rank).

    Raises:
        ValueError: If M is not a multiple of S, or too small, or if the output of `stage` differs
            from its input in shape or dtype.
    """
    invariants, aux = prepare(stage, options, weights, inputs, batch_inputs, keys)
    (outputs, totals), residuals = forward(invariants, inputs, aux, save_residuals=save_residuals)
    return (outputs, lax.psum(totals, (AXIS, *options.gather.batch_axes))), residuals


def backward_rank(
    stage: Stage,
    options: CircularOptions,
    weights: PyTree,
    inputs: PyTree,
    batch_inputs: PyTree,
    keys: PyTree,
    residuals: Residuals,
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


def prepare(
    stage: Stage,
    options: CircularOptions,
    weights: PyTree,
    inputs: PyTree,
    batch_inputs: PyTree,
    keys: PyTree,
) -> tuple[CircularInvariants, PyTree]:
    """Traces the stage and its backward; returns the loop invariants and the shapes of its aux."""
    S, n = lax.axis_size(AXIS), jax.tree.leaves(inputs)[0].shape[0]
    R = jax.tree.leaves(weights)[0].shape[0]
    check_circular(S, R, S * n, delay=options.delay)

    gather = repeat_gather(options.gather, weights)
    # Only the types of these arguments are used, to trace the stage.
    first = (index_leading(tree, 0) for tree in (inputs, batch_inputs, keys))
    examples = gather.unshard(gather.window(gather.prefetch(0), 0)), *first
    _, aux_shapes = jax.eval_shape(stage, *examples)
    shape = PipelineShape(S, R, S * n, 2 if options.delay else 1)
    traced = pullback(options.remat(stage), *examples)
    scan = options.scan_repeats
    return CircularInvariants(shape, traced, gather, batch_inputs, keys, scan), aux_shapes


def forward(
    invariants: CircularInvariants, inputs: PyTree, aux_shapes: PyTree, *, save_residuals: bool
) -> tuple[tuple[PyTree, Aux], Residuals]:
    """Runs all ticks of the forward on one rank.

    Args:
        invariants: What all ticks read.
        inputs: [n, ...] leaves, this rank's microbatches.
        aux_shapes: Shapes of the auxiliary losses and metrics of one tick.
        save_residuals: Whether residuals are stored for a backward.

    Returns:
        ((outputs [n, ...], aux summed over this rank's ticks), residuals, empty unless
        `save_residuals`).
    """
    shape, gather = invariants.shape, invariants.gather
    ticks = partial(_forward_ticks, invariants)
    state, totals = first_state(inputs, shape), zeros_like(aux_shapes)
    residuals = _allocate_residuals(invariants, inputs) if save_residuals else Residuals([], [])
    carry = gather.window(gather.prefetch(0), 0), (state, totals, residuals)

    def block(carry, j):
        prefetched, carry = carry
        prefetched_next = gather.prefetch(j + 1)  # for the next block: no tick of this one reads it
        return prefetched_next, ticks(steady(shape, j), prefetched, carry)

    if shape.num_repeats == 1:
        for phase in single_repeat(shape):
            carry = ticks(phase, None, carry)
    else:
        prefetched_next = gather.prefetch(1)
        carry = prefetched_next, ticks(warmup(shape), None, carry)
        repeats = jnp.arange(1, shape.num_repeats - 1)
        prefetched, carry = _loop(block, carry, repeats, scan=invariants.scan)
        carry = ticks(drain(shape), prefetched, carry)
    _, (state, totals, residuals) = carry
    return (realign(state.stream, shape), totals), residuals


def backward(
    invariants: CircularInvariants, residuals: Residuals, doutputs: PyTree, daux: Aux
) -> tuple[PyTree, PyTree, PyTree]:
    """Runs all ticks in reverse order; returns gradients of weights, inputs and batch inputs."""
    shape, gather = invariants.shape, invariants.gather
    final, half = shape.num_repeats - 1, middle_repeat(shape)
    flow = Cotangents(
        last_cotangent(doutputs, shape), zeros_like(floating(invariants.batch_inputs))
    )
    window, prefetched = _first_windows(gather, final, flow)
    zero_sum = gather.zeros(window)
    carry = prefetched, (WeightState(window, zero_sum, zero_sum), flow)
    blocks = partial(_backward_blocks, invariants, daux)
    gradients, carry = blocks(partial(read_second_half, residuals, shape), half, final, carry)
    if half:
        first, carry = blocks(partial(read_first_half, residuals, shape), 0, half - 1, carry)
        gradients = jax.tree.map(lambda *g: jnp.concatenate(g), first, gradients)
    _, (_, flow) = carry
    return gradients, flow.state.stream, flow.batch_inputs


def _first_windows(gather: RepeatGather, final: int, flow: Cotangents) -> tuple[PyTree, PyTree]:
    """Returns the window of the last repeat, and the prefetched weights of the one before it.

    Both are made only after the forward (`_after`). Otherwise the compiler would gather them during
    the forward and hold them until they are used.
    """
    window = gather.window(gather.prefetch(_after(final, flow.state)), final)
    return window, gather.prefetch(_after(final - 1, flow.state)) if final else ()


def _backward_blocks(
    invariants: CircularInvariants,
    daux: Aux,
    read: Callable,
    lowest: int,
    highest: int,
    carry: tuple,
) -> tuple[PyTree, tuple]:
    """Runs the blocks of repeats `highest` down to `lowest`.

    `carry` is the prefetched weights of repeat `highest - 1`, and (`WeightState`, `Cotangents`).

    Returns:
        The gradients of these repeats, [highest - lowest + 1, ...], and the carry for the repeats
        with lower indices.
    """
    shape, gather = invariants.shape, invariants.gather
    final = shape.num_repeats - 1
    ticks = partial(_backward_ticks, invariants, read, daux)

    def block(carry, j, phase=None):
        gradients, (prefetched, carry) = carry
        weight_state, flow = carry
        # For the next block: no tick of this one reads it. Repeat 0 is gathered once too often.
        below = jnp.maximum(j - 2, 0)
        in_loop = phase is None and invariants.scan
        prefetched_next = gather.prefetch(below if in_loop else _after(below, flow.state))
        weight_state, flow = ticks(phase or steady(shape, j), prefetched, carry)
        gradients = put(gradients, gather.reduce_scatter(weight_state.done), j - lowest)
        return gradients, (prefetched_next, (weight_state, flow))

    carry = gather.zero_gradients(highest - lowest + 1), carry
    if 0 < final == highest:
        carry = block(carry, final, drain(shape))
    below = min(highest, final - 1)
    carry = _loop(block, carry, jnp.arange(below, max(lowest, 1) - 1, -1), scan=invariants.scan)
    if lowest > 0:
        return carry
    gradients, (_, carry) = carry
    for phase in [warmup(shape)] if final else reversed([*single_repeat(shape)]):
        carry = ticks(phase, None, carry)
    return put(gradients, gather.reduce_scatter(carry[0].gradient), 0), ((), carry)


def _forward_ticks(
    invariants: CircularInvariants, phase: LoopPhase, prefetched: PyTree | None, carry: tuple
) -> tuple:
    """Returns the carry after the ticks of a phase.

    `prefetched` has the weights of the repeat that ranks begin in the phase; None if no rank begins
    one.
    """
    gather = invariants.gather

    def tick(carry, t):
        window, (state, totals, residuals) = carry
        work = work_at(t, invariants.shape)
        if prefetched is not None:
            begin = lambda _: gather.window(prefetched, work.repeat)  # noqa: E731
            window = lax.cond(_begins_repeat(work), begin, identity, window)
        x = next_input(state, t, from_stream=work.from_stream)
        batch_inputs, keys = _batch_inputs_and_keys(invariants, work)
        (y, aux), new = invariants.stage.forward(gather.unshard(window), x, batch_inputs, keys)
        totals = jax.tree.map(lambda a, b: a + jnp.where(work.busy, b, 0), totals, aux)
        residuals = store(residuals, new, t, invariants.shape)
        state = hand_over(state, y, t, enters=phase.enters, leaves=phase.leaves)
        return (window, (state, totals, residuals)), None

    return lax.scan(tick, carry, phase.ticks)[0]


def _backward_ticks(
    invariants: CircularInvariants,
    read: Callable[[Any], list[jax.Array]],
    daux: Aux,
    phase: LoopPhase,
    prefetched: PyTree | None,
    carry: tuple[WeightState, Cotangents],
) -> tuple[WeightState, Cotangents]:
    """Returns the carry after the ticks of a phase in reverse order.

    `prefetched` has the weights of the repeat with which ranks go on in the phase; None if no rank
    finishes a repeat in it.
    """
    gather = invariants.gather

    def tick(carry, t):
        weight_state, (dstate, dbatch_inputs) = carry
        work = work_at(t, invariants.shape)
        dstate, dy = take_back(dstate, t, enters=phase.enters, leaves=phase.leaves)
        daux_of_tick = jax.tree.map(lambda d: jnp.where(work.busy, d, 0), daux)
        batch_inputs, keys = _batch_inputs_and_keys(invariants, work)
        w = gather.unshard(weight_state.window)
        dw, dx, ds = invariants.stage.backward(w, batch_inputs, keys, read(t), (dy, daux_of_tick))
        gradient = gather.accumulate(weight_state.gradient, dw)
        weight_state = weight_state._replace(gradient=gradient)
        if prefetched is not None:
            go_on = lambda s: _begin_repeat(gather, prefetched, work.repeat - 1, s)  # noqa: E731
            weight_state = lax.cond(_begins_repeat(work), go_on, identity, weight_state)
        ds = jax.tree.map(jnp.add, index_leading(dbatch_inputs, work.microbatch), ds)
        dbatch_inputs = put(dbatch_inputs, ds, work.microbatch)
        dstate = add_input(dstate, dx, t, from_stream=work.from_stream)
        return (weight_state, Cotangents(dstate, dbatch_inputs)), None

    return lax.scan(tick, carry, phase.ticks, reverse=True)[0]


def _begin_repeat(
    gather: RepeatGather, prefetched: PyTree, repeat: Any, weight_state: WeightState
) -> WeightState:
    """Returns what a rank holds when it goes on with `repeat`, after the repeat `repeat + 1`."""
    return WeightState(
        gather.window(prefetched, repeat), zeros_like(weight_state.gradient), weight_state.gradient
    )


def _begins_repeat(work: TickWork) -> Bool[Array, ""]:
    """Returns whether a rank begins a repeat with `work`."""
    return work.busy & (work.microbatch == 0)


def _batch_inputs_and_keys(invariants: CircularInvariants, work: TickWork) -> tuple[PyTree, PyTree]:
    """Returns batch_inputs and keys of the microbatch that a rank works on."""
    keys = fold_in_microbatch(index_leading(invariants.keys, work.repeat), work.microbatch)
    return index_leading(invariants.batch_inputs, work.microbatch), keys


def _loop(body: Callable, carry: Any, values: Int[Array, " n"], *, scan: bool) -> Any:
    if scan and values.shape[0] > 1:
        return lax.scan(lambda carry, j: (body(carry, j), None), carry, values)[0]
    for j in values:
        carry = body(carry, j)
    return carry


def _after(index: Any, tree: PyTree) -> Int[Array, ""]:
    """Returns `index`, which XLA cannot use before `tree` is computed."""
    return lax.optimization_barrier((jnp.int32(index), jax.tree.leaves(tree)[0]))[0]


def _allocate_residuals(invariants: CircularInvariants, inputs: PyTree) -> Residuals:
    """Allocates buffers for the residuals of all ticks."""
    gather = invariants.gather

    def residuals(inputs):
        w = gather.unshard(gather.window(gather.prefetch(0), 0))
        batch_inputs = index_leading(invariants.batch_inputs, 0)
        keys = index_leading(invariants.keys, 0)
        return invariants.stage.forward(w, index_leading(inputs, 0), batch_inputs, keys)[1]

    return allocate(jax.make_jaxpr(residuals)(inputs).out_avals, invariants.shape)
