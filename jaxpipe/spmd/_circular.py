"""The circular pipeline: a stack of stages as one differentiable layer, activations in and out.

S ranks, R repeats, M microbatches, n = M / S of them kept by each rank. Stage `repeat * S + rank`.
A hand-over takes d ticks: 1, or 2 if it is delayed so that it overlaps with the next tick's work.
At tick t, rank r makes visit k = t - r * d: microbatch k % M in repeat k // M. While the pipeline
fills (k < 0) and drains (k >= R * M) a rank is in a bubble. It works all the same, on a microbatch
that lies in its stream: real data, since a norm's gradient at zero is NaN. The result is dropped.

Inputs lie spread over the ranks, n on each. They reach rank 0 by moving one rank down whenever it
has taken one, and outputs, entering on the last rank, fill the places that become free. This
stream moves in the M ticks in which microbatches enter and the M in which they leave.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree

from ..autodiff import Sums, at, fold, total
from ._ranks import AXIS

Remat = Callable[[Callable], Callable]
"""What wraps the work of one tick: `jax.checkpoint` with a policy, or the identity."""


class State(NamedTuple):
    """What one rank carries from tick to tick.

    Attributes:
        stream: [n, ...] inputs not taken yet, then outputs.
        handoff: What the rank before has handed over.
        underway: The d - 1 results that are still to be handed over, oldest first.
        waiting: [M - S * d + 1, ...], or [1, ...] if R = 1: a ring of what the last rank has handed
            over and rank 0 needs only in its next repeat. It means something on rank 0 alone.
    """

    stream: PyTree
    handoff: PyTree
    underway: tuple[PyTree, ...]
    waiting: PyTree


class Phase(NamedTuple):
    """Ticks [first, last) in all of which microbatches enter and leave, or do not."""

    first: int
    last: int
    enters: bool
    leaves: bool


def num_ticks(num_ranks: int, num_repeats: int, num_microbatches: int, *, delay: bool) -> int:
    """Ticks of the whole pipeline: M * R of work and d * (S - 1) of bubble."""
    return _num_ticks(num_ranks, num_repeats, num_microbatches, 2 if delay else 1)


def _num_ticks(num_ranks: int, num_repeats: int, num_microbatches: int, hop: int) -> int:
    return num_microbatches * num_repeats + hop * (num_ranks - 1)


def phases(num_ranks: int, num_repeats: int, num_microbatches: int, hop: int) -> Iterator[Phase]:
    """Cuts the ticks where microbatches begin or cease to enter or leave."""
    end = _num_ticks(num_ranks, num_repeats, num_microbatches, hop)
    leave = end - num_microbatches
    cuts = sorted({0, num_microbatches, leave, end})
    for first, last in pairwise(cuts):
        yield Phase(first, last, enters=first < num_microbatches, leaves=first >= leave)


def check_circular(num_ranks: int, num_repeats: int, num_microbatches: int, *, delay: bool) -> None:
    """Raises a `ValueError` if the circular pipeline cannot run these counts."""
    if num_microbatches < num_ranks:
        raise ValueError(
            f"There are {num_microbatches} microbatches for {num_ranks} ranks. The "
            "circular pipeline keeps an equal share of the microbatches on every rank: give at "
            f"least {num_ranks}."
        )
    if num_microbatches % num_ranks:
        raise ValueError(
            f"There are {num_microbatches} microbatches, not a multiple of the {num_ranks} ranks. "
            "The circular pipeline keeps an equal share of the microbatches on every rank."
        )
    if delay and num_repeats > 1 and num_microbatches < 2 * num_ranks:
        raise ValueError(
            f"There are {num_microbatches} microbatches, but with delayed forwarding each of them "
            f"needs 2 * {num_ranks} ticks for one round of {num_ranks} ranks. Give at least "
            f"{2 * num_ranks}, or turn the delay off."
        )


def run_rank(
    stage: Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, Sums]],
    weights: PyTree,
    inputs: PyTree,
    side: PyTree,
    keys: PyTree,
    *,
    delay: bool,
    remat: Remat,
) -> tuple[PyTree, Sums]:
    """Sends every microbatch through all stages. Runs on one rank inside the axis `stage`.

    Args:
        stage: `(weights of one stage, x, side of one microbatch, its keys) -> (y, sums)`.
        weights: [R, ...] leaves, this rank's stages.
        inputs: [n, ...] leaves, this rank's share: microbatches `rank * n` to `(rank + 1) * n`.
        side: [M, ...] leaves, the same on every rank.
        keys: [R, ...] leaves, this rank's dropout keys, or ().
        delay: Hand results over one tick late, so that the transfer overlaps with work.
        remat: Wraps the work of a tick. `jax.checkpoint` keeps one input per tick for the backward.

    Returns:
        (outputs like `inputs`, sums over this rank's stages and all microbatches).

    Raises:
        ValueError: If M does not suit the ranks, or `stage` does not return what it was given.
    """
    num_ranks, hop = lax.axis_size(AXIS), 2 if delay else 1
    num_repeats = jax.tree.leaves(weights)[0].shape[0]
    num_microbatches = num_ranks * jax.tree.leaves(inputs)[0].shape[0]
    sizes = num_ranks, num_repeats, num_microbatches, hop
    check_circular(num_ranks, num_repeats, num_microbatches, delay=delay)

    @remat
    def work(weights, keys, x, side, visit):
        repeat, microbatch = visit // num_microbatches, visit % num_microbatches
        rng = fold(at(keys, repeat), microbatch)
        return stage(at(weights, repeat), x, at(side, microbatch), rng)

    _check_stage(work, weights, keys, at(inputs, 0), side)

    def tick(phase: Phase, state: State, t: Int[Array, ""]) -> tuple[State, Sums]:
        visit = t - lax.axis_index(AXIS) * hop
        busy = (visit >= 0) & (visit < num_repeats * num_microbatches)
        enters = (lax.axis_index(AXIS) == 0) & (visit < num_microbatches)
        x = next_input(state, t, fresh=enters | ~busy)
        # The repeat of a bubble is out of range: any of this rank's weights will do.
        y, sums = work(weights, keys, x, side, visit)
        sums = jax.tree.map(lambda s: jnp.where(busy, s, jnp.zeros_like(s)), sums)
        return hand_over(phase, state, y, t), sums

    state, sums = first_state(inputs, *sizes), []
    for phase in phases(*sizes):
        ticks = jnp.arange(phase.first, phase.last)
        state, of_phase = lax.scan(partial(tick, phase), state, ticks)
        sums.append(total(of_phase))
    return realign(state.stream, *sizes), jax.tree.map(lambda *s: sum(s), *sums)


def first_state(
    inputs: PyTree, num_ranks: int, num_repeats: int, num_microbatches: int, hop: int
) -> State:
    """All microbatches before the pipeline, and poison in every buffer not written yet."""
    nothing = jax.tree.map(_poison, at(inputs, 0))
    num_waiting = num_microbatches - num_ranks * hop + 1 if num_repeats > 1 else 1
    waiting = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_waiting, *x.shape)), nothing)
    return State(inputs, nothing, (nothing,) * (hop - 1), waiting)


def next_input(state: State, t: Int[Array, ""], *, fresh: Bool[Array, ""]) -> PyTree:
    """What this rank works on: from the stream, back from the last rank, or handed over."""
    rank = lax.axis_index(AXIS)
    places = jax.tree.leaves(state.waiting)[0].shape[0]
    slots = jax.tree.leaves(state.stream)[0].shape[0]

    def pick(stream, waiting, handoff):
        returned = lax.dynamic_index_in_dim(waiting, t % places, keepdims=False)
        handed = jnp.where(rank == 0, returned, handoff)
        return jnp.where(fresh, lax.dynamic_index_in_dim(stream, t % slots, keepdims=False), handed)

    return jax.tree.map(pick, state.stream, state.waiting, state.handoff)


def hand_over(phase: Phase, state: State, y: PyTree, t: Int[Array, ""]) -> State:
    """Passes results on by one rank, and moves the stream if anything enters or leaves."""
    sent, *underway = (*state.underway, y)
    handoff = jax.tree.map(_to_next_rank, sent)
    # What arrives for tick t + 1 is due `places - 1` ticks later. Its place was read in this tick.
    places = jax.tree.leaves(state.waiting)[0].shape[0]
    waiting = _put(state.waiting, handoff, t % places)
    stream = state.stream
    if phase.enters or phase.leaves:
        stream = move_stream(stream, y, t, phase.leaves)
    return State(stream, handoff, tuple(underway), waiting)


def move_stream(stream: PyTree, y: PyTree, t: Int[Array, ""], leaves: bool) -> PyTree:
    """Moves one slot of every rank one rank down; `y` takes the last rank's if it `leaves`."""
    slot = t % jax.tree.leaves(stream)[0].shape[0]
    moved = jax.tree.map(_to_previous_rank, at(stream, slot))
    if leaves:
        last = lax.axis_index(AXIS) == lax.axis_size(AXIS) - 1
        moved = jax.tree.map(lambda new, old: jnp.where(last, new, old), y, moved)
    return _put(stream, moved, slot)


def realign(
    stream: PyTree, num_ranks: int, num_repeats: int, num_microbatches: int, hop: int
) -> PyTree:
    """Turns the slots so that slot i of rank r holds microbatch `r * n + i` again.

    Microbatch m left at tick m + c, into slot (m + c) % n: only the slots are turned, each rank
    already holds its own share.
    """
    c = _num_ticks(num_ranks, num_repeats, num_microbatches, hop) - num_microbatches
    slots = num_microbatches // num_ranks
    return jax.tree.map(lambda x: jnp.roll(x, -(c % slots), axis=0), stream)


def _poison(x: jax.Array) -> jax.Array:
    """Like `x`, but nothing one could compute with. (The `where` ties it to this rank.)"""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        worst = jnp.nan
    elif jnp.issubdtype(x.dtype, jnp.integer):
        worst = jnp.iinfo(x.dtype).max
    else:
        return x  # booleans and random keys have no value that would show
    return jnp.where(lax.axis_index(AXIS) < 0, x, jnp.full_like(x, worst))


def _put(buffer: PyTree, x: PyTree, index: Int[Array, ""]) -> PyTree:
    return jax.tree.map(
        lambda b, new: lax.dynamic_update_index_in_dim(b, new, index, axis=0), buffer, x
    )


def _to_next_rank(x: jax.Array) -> jax.Array:
    ranks = lax.axis_size(AXIS)
    return lax.ppermute(x, AXIS, [(r, (r + 1) % ranks) for r in range(ranks)])


def _to_previous_rank(x: jax.Array) -> jax.Array:
    ranks = lax.axis_size(AXIS)
    return lax.ppermute(x, AXIS, [((r + 1) % ranks, r) for r in range(ranks)])


def _check_stage(work: Callable, *arguments: PyTree) -> None:
    x, visit = arguments[2], jax.ShapeDtypeStruct((), jnp.int32)
    y, _ = jax.eval_shape(work, *arguments, visit)
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
