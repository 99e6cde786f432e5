"""The circular pipeline of one rank: all ticks forward, and all ticks backward.

The backward is written out here, not left to JAX's transposition of a loop, for four things that
this decides: weights are gathered again instead of kept, gradients add up in float32 and are
reduce-scattered once per repeat, what a tick keeps is written in place into one buffer, and no
buffer of the forward's movements is kept at all.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from ..autodiff import Pullback, Sums, at, floating, fold, pullback
from ._circular import (
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
from ._gather import Access, Gather, access
from ._kept import Kept, first_late_repeat, read_early, read_late, room, store
from ._ranks import AXIS, zeros
from ._segments import Segment, enter, last, mixed, only_repeat, settled

Stage = Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, Sums]]


class Run(NamedTuple):
    """What stays the same from tick to tick, on one rank.

    Attributes:
        counts: S, R, M and d.
        stage: The stage, forward and backward.
        weights: How this rank gets at its weights.
        side: [M, ...] leaves.
        keys: [R, ...] leaves, or ().
        scan: Whether the repeats between the first and the last are a loop of the program.
    """

    counts: Counts
    stage: Pullback
    weights: Access
    side: PyTree
    keys: PyTree
    scan: bool


class Backward(NamedTuple):
    """What the backward carries from tick to tick: cotangents of `State` and of `side`."""

    state: State
    side: PyTree


class How(NamedTuple):
    """What the caller of a circular pipeline chooses.

    Attributes:
        delay: Hand results over one tick late, so that the transfer overlaps with work.
        remat: Wraps a stage: what of a tick is kept for the backward.
        gather: When weights are gathered.
        scan_repeats: Whether repeats are a loop of the program, or written out.
    """

    delay: bool
    remat: Callable[[Callable], Callable]
    gather: Gather
    scan_repeats: bool


def forward_rank(
    stage: Stage, how: How, keep: bool, weights: PyTree, inputs: PyTree, side: PyTree, keys: PyTree
) -> tuple[tuple[PyTree, Sums], Kept]:
    """Sends every microbatch through all stages. Runs on one rank inside the axis `stage`.

    Args:
        stage: `(weights of one stage, x, side of one microbatch, its keys) -> (y, sums)`.
        how: The choices.
        keep: Whether a backward follows.
        weights: [R, ...] leaves, this rank's stages.
        inputs: [n, ...] leaves, this rank's share: microbatches `rank * n` to `(rank + 1) * n`.
        side: [M, ...] leaves, the same on every rank.
        keys: [R, ...] leaves, this rank's dropout keys, or ().

    Returns:
        ((outputs like `inputs`, sums over all stages and microbatches), residuals of this rank).

    Raises:
        ValueError: If M does not suit the ranks, or `stage` does not return what it was given.
    """
    run, of_tick = prepare(stage, how, weights, inputs, side, keys)
    (outputs, totals), kept = forward(run, inputs, of_tick, keep=keep)
    return (outputs, lax.psum(totals, (AXIS, *how.gather.batch_axes))), kept


def backward_rank(
    stage: Stage,
    how: How,
    weights: PyTree,
    inputs: PyTree,
    side: PyTree,
    keys: PyTree,
    kept: Kept,
    doutputs: PyTree,
    dsums: Sums,
) -> tuple[PyTree, PyTree, PyTree]:
    """Gradients of weights, inputs and side, None for leaves that are not floating.

    Takes what `forward_rank` took (of `inputs` only the shapes), what it kept, and cotangents.
    """
    run, _ = prepare(stage, how, weights, inputs, side, keys)
    gradients, dinputs, dside = backward(run, kept, doutputs, dsums)
    narrow = jax.tree.map(lambda g, w: g.astype(w.dtype), gradients, floating(weights))
    return narrow, dinputs, lax.psum(dside, AXIS)


def prepare(
    stage: Stage, how: How, weights: PyTree, inputs: PyTree, side: PyTree, keys: PyTree
) -> tuple[Run, PyTree]:
    """The stage traced and divided, and the shapes of its sums."""
    S, n = lax.axis_size(AXIS), jax.tree.leaves(inputs)[0].shape[0]
    R = jax.tree.leaves(weights)[0].shape[0]
    check_circular(S, R, S * n, delay=how.delay)

    rooms = access(how.gather, weights)
    # Nobody computes with this visit: it is there for its types.
    visit = rooms.read(rooms.window(0)), at(inputs, 0), at(side, 0), at(keys, 0)
    y, sums = jax.eval_shape(stage, *visit)
    _check_output(visit[1], y)
    counts = Counts(S, R, S * n, 2 if how.delay else 1)
    return Run(
        counts, pullback(how.remat(stage), *visit), rooms, side, keys, how.scan_repeats
    ), sums


def forward(
    run: Run, inputs: PyTree, sums: PyTree, *, keep: bool
) -> tuple[tuple[PyTree, Sums], Kept]:
    """All ticks: outputs and sums, and the residuals if they are to be kept.

    Args:
        run: What to run.
        inputs: [n, ...] leaves.
        sums: Shapes of the sums of one tick.
        keep: Whether a backward follows.
    """
    counts, window = run.counts, run.weights.window
    ticks = partial(_forward_ticks, run)
    carry = first_state(inputs, counts), _zeros(sums), _room(run, inputs) if keep else Kept([], [])

    def repeat(carry, j):
        (old, new), carry = carry
        carry = ticks(mixed(counts, j), (old, new), j, carry)
        following = window(j + 1)  # nothing below waits for it
        return (new, following), ticks(settled(counts, j), (new,), j, carry)

    if counts.num_repeats == 1:
        only = (window(0),)
        for segment in only_repeat(counts):
            carry = ticks(segment, only, 0, carry)
    else:
        final = counts.num_repeats - 1
        old, new = window(0), window(1)
        carry = ticks(enter(counts), (old,), 0, carry)
        (old, new), carry = _loop(repeat, ((old, new), carry), jnp.arange(1, final), scan=run.scan)
        carry = ticks(mixed(counts, final), (old, new), final, carry)
        carry = ticks(last(counts), (new,), final, carry)
    state, totals, kept = carry
    return (realign(state.stream, counts), totals), kept


def backward(run: Run, kept: Kept, doutputs: PyTree, dsums: Sums) -> tuple[PyTree, PyTree, PyTree]:
    """All ticks, the last one first: gradients of weights, inputs and side."""
    final, half = run.counts.num_repeats - 1, first_late_repeat(run.counts)
    carry = Backward(last_cotangent(doutputs, run.counts), _zeros(floating(run.side)))
    # Else the compiler would take this window in the forward, and hold it until it is used.
    window = run.weights.window(_after(final, carry.state))
    sums = (window, run.weights.zeros(window)), carry
    gradients, sums = _backward_repeats(
        run, partial(read_late, kept, run.counts), dsums, half, final, sums
    )
    if half:
        read = partial(read_early, kept, run.counts)
        early, sums = _backward_repeats(run, read, dsums, 0, half - 1, sums)
        gradients = jax.tree.map(lambda *g: jnp.concatenate(g), early, gradients)
    _, carry = sums
    return gradients, carry.state.stream, carry.side


def _backward_repeats(
    run: Run, read: Callable, dsums: Sums, lowest: int, highest: int, carry: tuple
) -> tuple[PyTree, tuple]:
    """Repeats `highest` to `lowest`, but for mixed ticks with the repeat above, which are done.

    Returns their gradients, [highest - lowest + 1, ...], and the carry: window and gradient of the
    repeat below, and `Backward`.
    """
    counts, weights = run.counts, run.weights
    final = counts.num_repeats - 1
    ticks = partial(_backward_ticks, run, read, dsums)

    def repeat(carry, j, rest=settled):
        gradients, ((new, dnew), carry) = carry
        # Nothing in the settled ticks waits for it.
        old = weights.window(j - 1 if rest is settled else _after(j - 1, carry.state))
        (dnew,), carry = ticks(rest(counts, j), (new,), (dnew,), j, carry)
        grads = weights.zeros(old), dnew
        (dold, dnew), carry = ticks(mixed(counts, j), (old, new), grads, j, carry)
        return put(gradients, weights.close(dnew), j - lowest), ((old, dold), carry)

    carry = weights.gradients(highest - lowest + 1), carry
    if 0 < final == highest:
        carry = repeat(carry, final, lambda counts, _: last(counts))
    below = min(highest, final - 1)
    carry = _loop(repeat, carry, jnp.arange(below, max(lowest, 1) - 1, -1), scan=run.scan)
    if lowest > 0:
        return carry
    gradients, ((window, grads), rest) = carry
    for segment in [enter(counts)] if final else reversed([*only_repeat(counts)]):
        (grads,), rest = ticks(segment, (window,), (grads,), 0, rest)
    return put(gradients, weights.close(grads), 0), ((window, grads), rest)


def _forward_ticks(
    run: Run, segment: Segment, windows: tuple[PyTree, ...], newest: Any, carry: tuple
) -> tuple:
    """The ticks of a segment. `windows` hold the weights of repeats up to `newest`."""

    def tick(carry, t):
        state, totals, kept = carry
        visit = visit_at(t, run.counts)
        w = run.weights.read(_choose(windows, visit.repeat >= newest))
        x = next_input(state, t, fresh=visit.fresh)
        side, keys = _of_visit(run, visit)
        (y, sums), residuals = run.stage.forward(w, x, side, keys)
        totals = jax.tree.map(lambda a, b: a + jnp.where(visit.busy, b, 0), totals, sums)
        kept = store(kept, residuals, t, run.counts) if kept.late else kept
        state = hand_over(state, y, t, enters=segment.enters, leaves=segment.leaves)
        return (state, totals, kept), None

    return lax.scan(tick, carry, segment.ticks)[0]


def _backward_ticks(
    run: Run,
    read: Callable[[Any], list[jax.Array]],
    dsums: Sums,
    segment: Segment,
    windows: tuple[PyTree, ...],
    gradients: tuple[PyTree, ...],
    newest: Any,
    carry: Backward,
) -> tuple[tuple[PyTree, ...], Backward]:
    """The ticks of a segment, the last one first. `gradients` add up, one for each window."""

    def tick(carry, t):
        gradients, (dstate, dside) = carry
        visit = visit_at(t, run.counts)
        dstate, dy = take_back(dstate, t, enters=segment.enters, leaves=segment.leaves)
        of_sums = jax.tree.map(lambda d: jnp.where(visit.busy, d, 0), dsums)
        w = run.weights.read(_choose(windows, visit.repeat >= newest))
        side, keys = _of_visit(run, visit)
        dw, dx, ds = run.stage.backward(w, side, keys, read(t), (dy, of_sums))
        dw = run.weights.give(dw)
        gradients = _add(gradients, dw, visit.repeat >= newest)
        dside = put(dside, jax.tree.map(jnp.add, at(dside, visit.microbatch), ds), visit.microbatch)
        return (gradients, Backward(add_input(dstate, dx, t, fresh=visit.fresh), dside)), None

    return lax.scan(tick, (gradients, carry), segment.ticks, reverse=True)[0]


def _choose(windows: tuple[PyTree, ...], moved_on: Any) -> PyTree:
    if len(windows) == 1:
        return windows[0]
    return jax.tree.map(lambda old, new: jnp.where(moved_on, new, old), *windows)


def _add(gradients: tuple[PyTree, ...], dw: PyTree, moved_on: Any) -> tuple[PyTree, ...]:
    """Adds the gradient of a tick to that of the window that the tick has read."""
    if len(gradients) == 1:
        return (jax.tree.map(jnp.add, gradients[0], dw),)
    old, new = _where(~moved_on, dw), _where(moved_on, dw)
    return tuple(jax.tree.map(jnp.add, g, d) for g, d in zip(gradients, (old, new), strict=True))


def _where(condition: Any, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.where(condition, x, jnp.zeros_like(x)), tree)


def _of_visit(run: Run, visit: Visit) -> tuple[PyTree, PyTree]:
    """Side and keys of the microbatch that a rank works on."""
    keys = fold(at(run.keys, visit.repeat), visit.microbatch)
    return at(run.side, visit.microbatch), keys


def _loop(body: Callable, carry: Any, values: Int[Array, " n"], *, scan: bool) -> Any:
    if scan and values.shape[0] > 1:
        return lax.scan(lambda carry, j: (body(carry, j), None), carry, values)[0]
    for j in values:
        carry = body(carry, j)
    return carry


def _after(index: int, tree: PyTree) -> Int[Array, ""]:
    """`index`, not before `tree` is there."""
    return lax.optimization_barrier((jnp.int32(index), jax.tree.leaves(tree)[0]))[0]


def _zeros(tree: PyTree) -> PyTree:
    return jax.tree.map(zeros, tree)


def _room(run: Run, inputs: PyTree) -> Kept:
    """Buffers for what the ticks keep."""

    def residuals(inputs):
        w = run.weights.read(run.weights.window(0))
        side, keys = at(run.side, 0), at(run.keys, 0)
        return run.stage.forward(w, at(inputs, 0), side, keys)[1]

    return room(jax.make_jaxpr(residuals)(inputs).out_avals, run.counts)


def _check_output(x: PyTree, y: PyTree) -> None:
    given, returned = jax.tree.structure(x), jax.tree.structure(y)
    if given == returned:
        given, returned = _leaves(x), _leaves(y)
    if given != returned:
        raise ValueError(
            f"`stage` was given {given} and returned {returned}. It must return what the next "
            "stage can take: the same structure, shapes and dtypes."
        )


def _leaves(tree: PyTree) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}
