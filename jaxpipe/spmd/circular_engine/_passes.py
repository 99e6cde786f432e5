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

from ...autodiff._model import Aux, fold_in_microbatch, index_leading
from ...autodiff._pullback import Pullback, floating, pullback
from .._ranks import AXIS
from .._varying import zeros
from .._weight_gather import Access, Gather, access, same
from ._residuals import Kept, first_late_repeat, read_early, read_late, room, store
from ._segments import Segment, enter, last, middle, only_repeat
from ._shape import (
    Counts,
    State,
    Visit,
    add_input,
    check_circular,
    first_state,
    hand_over,
    last_cotangent,
    next_input,
    put,
    realign,
    take_back,
    visit_at,
)

Stage = Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, Aux]]


class Run(NamedTuple):
    """Loop invariants: the values that a tick reads and does not change, on one rank.

    Attributes:
        counts: S, R, M and d.
        stage: The stage, forward and backward.
        weights: Functions that gather this rank's weights and reduce-scatter their gradients.
        batch_inputs: [M, ...] leaves.
        keys: [R, ...] leaves, or ().
        scan: Whether the repeats between the first and the last run in a `lax.scan`.
    """

    counts: Counts
    stage: Pullback
    weights: Access
    batch_inputs: PyTree
    keys: PyTree
    scan: bool


class Backward(NamedTuple):
    """Carry of the backward's loop: the cotangents of `State` and of `batch_inputs`."""

    state: State
    batch_inputs: PyTree


class Held(NamedTuple):
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


class How(NamedTuple):
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
    how: How,
    keep: bool,
    weights: PyTree,
    inputs: PyTree,
    batch_inputs: PyTree,
    keys: PyTree,
) -> tuple[tuple[PyTree, Aux], Kept]:
    """Sends every microbatch through all stages. Runs on one rank inside the axis `stage`.

    Args:
        stage: `(weights of one stage, x, batch_inputs of one microbatch, its keys) -> (y, aux)`.
        how: The options of the pipeline.
        keep: Whether residuals are stored for a backward.
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
    run, aux_shapes = prepare(stage, how, weights, inputs, batch_inputs, keys)
    (outputs, totals), kept = forward(run, inputs, aux_shapes, keep=keep)
    return (outputs, lax.psum(totals, (AXIS, *how.gather.batch_axes))), kept


def backward_rank(
    stage: Stage,
    how: How,
    weights: PyTree,
    inputs: PyTree,
    batch_inputs: PyTree,
    keys: PyTree,
    kept: Kept,
    doutputs: PyTree,
    daux: Aux,
) -> tuple[PyTree, PyTree, PyTree]:
    """Returns the gradients of weights, inputs and batch_inputs, None for leaves that are not
    floating.

    Takes the arguments of `forward_rank` (of `inputs` only the shapes are read), the residuals
    that it returned, and the cotangents of its outputs and aux.
    """
    run, _ = prepare(stage, how, weights, inputs, batch_inputs, keys)
    gradients, dinputs, dbatch_inputs = backward(run, kept, doutputs, daux)
    narrow = jax.tree.map(lambda g, w: g.astype(w.dtype), gradients, floating(weights))
    return narrow, dinputs, lax.psum(dbatch_inputs, AXIS)


def prepare(
    stage: Stage, how: How, weights: PyTree, inputs: PyTree, batch_inputs: PyTree, keys: PyTree
) -> tuple[Run, PyTree]:
    """Traces the stage and its backward; returns the loop invariants and the shapes of its aux."""
    S, n = lax.axis_size(AXIS), jax.tree.leaves(inputs)[0].shape[0]
    R = jax.tree.leaves(weights)[0].shape[0]
    check_circular(S, R, S * n, delay=how.delay)

    rooms = access(how.gather, weights)
    # Only the types of these arguments are used, to trace the stage.
    first = (index_leading(tree, 0) for tree in (inputs, batch_inputs, keys))
    visit = rooms.read(rooms.window(rooms.ahead(0), 0)), *first
    _, aux_shapes = jax.eval_shape(stage, *visit)
    counts = Counts(S, R, S * n, 2 if how.delay else 1)
    return Run(
        counts, pullback(how.remat(stage), *visit), rooms, batch_inputs, keys, how.scan_repeats
    ), aux_shapes


def forward(
    run: Run, inputs: PyTree, aux_shapes: PyTree, *, keep: bool
) -> tuple[tuple[PyTree, Aux], Kept]:
    """Runs all ticks of the forward on one rank.

    Args:
        run: The loop invariants.
        inputs: [n, ...] leaves, this rank's microbatches.
        aux_shapes: Shapes of the auxiliary losses and metrics of one tick.
        keep: Whether residuals are stored for a backward.

    Returns:
        ((outputs [n, ...], aux summed over this rank's ticks), residuals, empty unless `keep`).
    """
    counts, weights = run.counts, run.weights
    ticks = partial(_forward_ticks, run)
    kept = _room(run, inputs) if keep else Kept([], [])
    flow = first_state(inputs, counts), _zeros(aux_shapes), kept
    carry = weights.window(weights.ahead(0), 0), flow

    def block(carry, j):
        ahead, carry = carry
        following = weights.ahead(j + 1)  # for the next block: no tick of this one reads it
        return following, ticks(middle(counts, j), ahead, carry)

    if counts.num_repeats == 1:
        for segment in only_repeat(counts):
            carry = ticks(segment, None, carry)
    else:
        following = weights.ahead(1)
        carry = following, ticks(enter(counts), None, carry)
        repeats = jnp.arange(1, counts.num_repeats - 1)
        ahead, carry = _loop(block, carry, repeats, scan=run.scan)
        carry = ticks(last(counts), ahead, carry)
    _, (state, totals, kept) = carry
    return (realign(state.stream, counts), totals), kept


def backward(run: Run, kept: Kept, doutputs: PyTree, daux: Aux) -> tuple[PyTree, PyTree, PyTree]:
    """Runs all ticks in reverse order; returns gradients of weights, inputs and batch inputs."""
    counts, weights = run.counts, run.weights
    final, half = counts.num_repeats - 1, first_late_repeat(counts)
    flow = Backward(last_cotangent(doutputs, counts), _zeros(floating(run.batch_inputs)))
    window, ahead = _first_windows(weights, final, flow)
    nothing = weights.zeros(window)
    carry = ahead, (Held(window, nothing, nothing), flow)
    blocks = partial(_backward_blocks, run, daux)
    gradients, carry = blocks(partial(read_late, kept, counts), half, final, carry)
    if half:
        early, carry = blocks(partial(read_early, kept, counts), 0, half - 1, carry)
        gradients = jax.tree.map(lambda *g: jnp.concatenate(g), early, gradients)
    _, (_, flow) = carry
    return gradients, flow.state.stream, flow.batch_inputs


def _first_windows(weights: Access, final: int, flow: Backward) -> tuple[PyTree, PyTree]:
    """Returns the window of the last repeat, and the prefetched weights of the one before it.

    Both are made only after the forward (`_after`). Otherwise the compiler would gather them during
    the forward and hold them until they are used.
    """
    window = weights.window(weights.ahead(_after(final, flow.state)), final)
    return window, weights.ahead(_after(final - 1, flow.state)) if final else ()


def _backward_blocks(
    run: Run, daux: Aux, read: Callable, lowest: int, highest: int, carry: tuple
) -> tuple[PyTree, tuple]:
    """Runs the blocks of repeats `highest` down to `lowest`.

    `carry` is the prefetched weights of repeat `highest - 1`, and (`Held`, `Backward`).

    Returns the gradients of these repeats, [highest - lowest + 1, ...], and the carry for the
    repeats with lower indices.
    """
    counts, weights = run.counts, run.weights
    final = counts.num_repeats - 1
    ticks = partial(_backward_ticks, run, read, daux)

    def block(carry, j, segment=None):
        gradients, (ahead, carry) = carry
        held, flow = carry
        # For the next block: no tick of this one reads it. Repeat 0 is gathered once too often.
        below = jnp.maximum(j - 2, 0)
        in_loop = segment is None and run.scan
        following = weights.ahead(below if in_loop else _after(below, flow.state))
        held, flow = ticks(segment or middle(counts, j), ahead, carry)
        gradients = put(gradients, weights.close(held.done), j - lowest)
        return gradients, (following, (held, flow))

    carry = weights.gradients(highest - lowest + 1), carry
    if 0 < final == highest:
        carry = block(carry, final, last(counts))
    below = min(highest, final - 1)
    carry = _loop(block, carry, jnp.arange(below, max(lowest, 1) - 1, -1), scan=run.scan)
    if lowest > 0:
        return carry
    gradients, (_, carry) = carry
    for segment in [enter(counts)] if final else reversed([*only_repeat(counts)]):
        carry = ticks(segment, None, carry)
    return put(gradients, weights.close(carry[0].gradient), 0), ((), carry)


def _forward_ticks(run: Run, segment: Segment, ahead: PyTree | None, carry: tuple) -> tuple:
    """Runs the ticks of a segment.

    `ahead` has the prefetched weights of the repeat that ranks begin in the segment; None if no
    rank begins one.
    """

    def tick(carry, t):
        window, (state, totals, kept) = carry
        visit = visit_at(t, run.counts)
        if ahead is not None:
            begin = lambda _: run.weights.window(ahead, visit.repeat)  # noqa: E731
            window = lax.cond(_is_first(visit), begin, same, window)
        x = next_input(state, t, fresh=visit.fresh)
        batch_inputs, keys = _of_visit(run, visit)
        (y, aux), residuals = run.stage.forward(run.weights.read(window), x, batch_inputs, keys)
        totals = jax.tree.map(lambda a, b: a + jnp.where(visit.busy, b, 0), totals, aux)
        kept = store(kept, residuals, t, run.counts) if kept.late else kept
        state = hand_over(state, y, t, enters=segment.enters, leaves=segment.leaves)
        return (window, (state, totals, kept)), None

    return lax.scan(tick, carry, segment.ticks)[0]


def _backward_ticks(
    run: Run,
    read: Callable[[Any], list[jax.Array]],
    daux: Aux,
    segment: Segment,
    ahead: PyTree | None,
    carry: tuple[Held, Backward],
) -> tuple[Held, Backward]:
    """Runs the ticks of a segment in reverse order.

    `ahead` has the prefetched weights of the repeat with which ranks go on in the segment; None if
    no rank finishes a repeat in it.
    """

    def tick(carry, t):
        held, (dstate, dbatch_inputs) = carry
        visit = visit_at(t, run.counts)
        dstate, dy = take_back(dstate, t, enters=segment.enters, leaves=segment.leaves)
        daux_of_tick = jax.tree.map(lambda d: jnp.where(visit.busy, d, 0), daux)
        batch_inputs, keys = _of_visit(run, visit)
        w = run.weights.read(held.window)
        dw, dx, ds = run.stage.backward(w, batch_inputs, keys, read(t), (dy, daux_of_tick))
        gradient = jax.tree.map(jnp.add, held.gradient, run.weights.give(dw))
        held = held._replace(gradient=gradient)
        if ahead is not None:
            go_on = lambda held: _below(run.weights, ahead, visit.repeat - 1, held)  # noqa: E731
            held = lax.cond(_is_first(visit), go_on, same, held)
        ds = jax.tree.map(jnp.add, index_leading(dbatch_inputs, visit.microbatch), ds)
        dbatch_inputs = put(dbatch_inputs, ds, visit.microbatch)
        return (held, Backward(add_input(dstate, dx, t, fresh=visit.fresh), dbatch_inputs)), None

    return lax.scan(tick, carry, segment.ticks, reverse=True)[0]


def _below(weights: Access, ahead: PyTree, repeat: Any, held: Held) -> Held:
    """Returns what a rank holds when it goes on with `repeat`, after the repeat `repeat + 1`."""
    return Held(weights.window(ahead, repeat), _zeros(held.gradient), held.gradient)


def _is_first(visit: Visit) -> Bool[Array, ""]:
    """Returns whether `visit` is a rank's first in its repeat."""
    return visit.busy & (visit.microbatch == 0)


def _of_visit(run: Run, visit: Visit) -> tuple[PyTree, PyTree]:
    """Returns batch_inputs and keys of the microbatch that a rank works on."""
    keys = fold_in_microbatch(index_leading(run.keys, visit.repeat), visit.microbatch)
    return index_leading(run.batch_inputs, visit.microbatch), keys


def _loop(body: Callable, carry: Any, values: Int[Array, " n"], *, scan: bool) -> Any:
    if scan and values.shape[0] > 1:
        return lax.scan(lambda carry, j: (body(carry, j), None), carry, values)[0]
    for j in values:
        carry = body(carry, j)
    return carry


def _after(index: Any, tree: PyTree) -> Int[Array, ""]:
    """Returns `index`, which XLA cannot use before `tree` is computed."""
    return lax.optimization_barrier((jnp.int32(index), jax.tree.leaves(tree)[0]))[0]


def _zeros(tree: PyTree) -> PyTree:
    return jax.tree.map(zeros, tree)


def _room(run: Run, inputs: PyTree) -> Kept:
    """Allocates buffers for the residuals of all ticks."""

    def residuals(inputs):
        w = run.weights.read(run.weights.window(run.weights.ahead(0), 0))
        batch_inputs, keys = index_leading(run.batch_inputs, 0), index_leading(run.keys, 0)
        return run.stage.forward(w, index_leading(inputs, 0), batch_inputs, keys)[1]

    return room(jax.make_jaxpr(residuals)(inputs).out_avals, run.counts)
