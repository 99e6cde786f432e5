"""How microbatches move through a circular pipeline, seen by one rank.

S ranks, R repeats, M microbatches, n = M / S of them stored by each rank. Rank `rank` runs stage
`repeat * S + rank` in a repeat. A hand-over takes d ticks: 1, or 2 if it is delayed so that it
overlaps with the next tick's computation. At tick t, rank r runs its forward k = t - r * d, which
is that of microbatch k % M in repeat k // M. While the pipeline fills (k < 0) and drains
(k >= R * M) a rank is in a bubble. In a bubble it runs its stage on a microbatch that is stored in
its stream and drops the result. It uses real data because a norm's gradient at zero is NaN.

Inputs are sharded over the ranks, n on each, and rank 0 takes one after the other. Outputs are
written on the last rank, into the slots that become free. This stream moves one rank down while
microbatches enter that are not on rank 0 yet, and while results leave that another rank is to store
(`stream_move`): in M - n ticks each. All ranks agree in which ticks that is, so the permute may be
under a condition.

These functions are the only place of the schedule's arithmetic. The circular engine calls them on
one rank after the other's tick, and `spmd.stepwise`, of which MaxText's documented methods are
made, on all ranks at once (`on_ranks`).

All of this is linear, so the backward is the same movement transposed: each function that moves a
state has a transpose that moves the state's cotangent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree

from ...autodiff.staged_model import index_leading
from ...ir.transforms import join_parts
from ...schedules.builders import circular_ticks
from .._buffers import add_trees, put
from ..ranks import AXIS, ON_ALL_RANKS, execution_count_hint, poison, update_if

TickIndex = int | Int[Array, ""]
"""Index of a tick; a Python integer where ticks are unrolled."""


@dataclass(frozen=True)
class PipelineShape:
    """Sizes of a circular pipeline.

    Attributes:
        num_ranks: S, the ranks of the pipeline.
        num_repeats: R, the stages of each rank.
        num_microbatches: M, a multiple of S.
        forwarding_delay: d, ticks of a hand-over: 1, or 2 if it is delayed.
    """

    num_ranks: int
    num_repeats: int
    num_microbatches: int
    forwarding_delay: int = 1

    @property
    def microbatches_per_rank(self) -> int:
        """Number of microbatches that a rank stores, n = M / S."""
        return self.num_microbatches // self.num_ranks

    @property
    def num_ticks(self) -> int:
        """Number of ticks of the whole pipeline, M * R + d * (S - 1)."""
        counts = self.num_ranks, self.num_repeats, self.num_microbatches
        return circular_ticks(*counts, self.forwarding_delay)

    @property
    def ticks_until_read(self) -> int:
        """Ticks from the one that hands over a result to rank 0 to the one that reads it."""
        return self.num_microbatches - self.num_ranks * self.forwarding_delay + 1


class State(NamedTuple):
    """Activation buffers that one rank carries from tick to tick.

    Attributes:
        stream: [n, ...] inputs not taken yet, then outputs.
        storage: [`ticks_until_read`, ...], [1, ...] if R = 1: a ring buffer of the results that the
            rank before has handed over. Tick t writes slot t. Rank 0 reads a result in its next
            repeat, in the tick that overwrites it; all others read it in the tick after.
        in_flight: The d - 1 results that are still to be handed over, oldest first.
    """

    stream: PyTree
    storage: PyTree
    in_flight: tuple[PyTree, ...]


class TickWork(NamedTuple):
    """Work of a rank in a tick: a microbatch and a repeat, unless the rank is in a bubble.

    All values are scalars, or [ranks] for several ranks.

    Attributes:
        repeat: Index of the repeat; out of range in a bubble.
        microbatch: Index of the microbatch; in range also in a bubble.
        from_stream: Whether the input is read from the stream: on rank 0 for a new microbatch, and
            in a bubble.
    """

    repeat: Int[Array, "*ranks"]
    microbatch: Int[Array, "*ranks"]
    busy: Bool[Array, "*ranks"]
    from_stream: Bool[Array, "*ranks"]


def work_at(t: TickIndex, shape: PipelineShape) -> TickWork:
    """Returns the work of this rank at tick `t`."""
    return work_of_rank(t, lax.axis_index(AXIS), shape)


def work_of_rank(t: TickIndex, rank: Int[Array, "*ranks"], shape: PipelineShape) -> TickWork:
    """Returns the work of one rank, or of several ranks, at tick `t`."""
    M = shape.num_microbatches
    index = t - rank * shape.forwarding_delay
    busy = (index >= 0) & (index < shape.num_repeats * M)
    enters = (rank == 0) & (index < M)
    return TickWork(index // M, index % M, busy, enters | ~busy)


def begins_on_rank_0(t: TickIndex, shape: PipelineShape) -> bool | Bool[Array, ""]:
    """Returns whether rank 0 begins a repeat at tick `t`. All others have begun the one before."""
    M = shape.num_microbatches
    return (t % M == 0) & (t < shape.num_repeats * M)


def hint_of_repeats(shape: PipelineShape, ticks: range) -> str:
    """Returns a name scope that says in how many of `ticks` a rank begins a repeat."""
    return execution_count_hint([[u] for u in ticks], lambda u: bool(begins_on_rank_0(u, shape)))


def hint_of_entries(shape: PipelineShape, ticks: range) -> str:
    """Returns a name scope that says in how many of `ticks` a microbatch enters."""
    return execution_count_hint([[u] for u in ticks], lambda u: u < shape.num_microbatches)


def check_circular(
    num_ranks: int,
    num_repeats: int,
    num_microbatches: int,
    *,
    delay: bool,
    names: tuple[str, str] = ("dim 0 of `inputs` and `batch_inputs`", "`delay`"),
) -> None:
    """Checks that the circular pipeline can run these counts; errors use `names`."""
    in_microbatches, in_delay = names
    if num_microbatches < num_ranks:
        raise ValueError(
            f"There are {num_microbatches} microbatches for {num_ranks} ranks. The circular "
            "pipeline keeps an equal share of the microbatches on every rank: make "
            f"{in_microbatches} at least {num_ranks}."
        )
    if num_microbatches % num_ranks:
        raise ValueError(
            f"There are {num_microbatches} microbatches, not a multiple of the {num_ranks} ranks. "
            "The circular pipeline keeps an equal share of the microbatches on every rank: make "
            f"{in_microbatches} a multiple of {num_ranks}."
        )
    if delay and num_repeats > 1 and num_microbatches < 2 * num_ranks:
        raise ValueError(
            f"There are {num_microbatches} microbatches, but with delayed forwarding each of them "
            f"needs 2 * {num_ranks} ticks for one round of {num_ranks} ranks. Make "
            f"{in_microbatches} at least {2 * num_ranks}, or {in_delay} False."
        )


def first_state(inputs: PyTree, shape: PipelineShape) -> State:
    """Returns the state before tick 0: all inputs in the stream, the other buffers poisoned."""
    return _state(inputs, jax.tree.map(poison, index_leading(inputs, 0)), shape)


def last_cotangent(outputs: PyTree, shape: PipelineShape) -> State:
    """Returns the cotangent of the last state: that of the outputs; other buffers are zero."""
    zero = jax.tree.map(jnp.zeros_like, index_leading(outputs, 0))
    return _state(roll_slots(outputs, first_exit(shape)), zero, shape)


def _state(stream: PyTree, x: PyTree, shape: PipelineShape) -> State:
    """Returns a state with `stream`, and `x` in every other buffer."""
    length = shape.ticks_until_read if shape.num_repeats > 1 else 1
    storage = jax.tree.map(lambda x: jnp.broadcast_to(x, (length, *x.shape)), x)
    return State(stream, storage, (x,) * (shape.forwarding_delay - 1))


def next_input(state: State, t: TickIndex, *, from_stream: Bool[Array, ""]) -> PyTree:
    """Returns the stage input of this rank at tick `t`, out of the stream if `from_stream`."""
    new = index_leading(state.stream, t % _length(state.stream))
    stored = index_leading(state.storage, _input_slot(state, t))
    return jax.tree.map(partial(jnp.where, from_stream), new, stored)


def add_input(state: State, dx: PyTree, t: TickIndex, *, work: TickWork, hint: str) -> State:
    """Gives `dx`, the cotangent of a stage input, to the buffer that `next_input` read it from."""
    in_flight = state.in_flight
    if in_flight:
        in_flight, dx = _after_transfer(in_flight, dx)
    # Every slot of the storage is read once before it is written again, so its cotangent is set,
    # also to zero: `take_back` leaves what it has taken.
    storage = put(state.storage, _where(~work.from_stream, dx), _input_slot(state, t))

    def add_to_slot(stream: PyTree) -> PyTree:
        slot = t % _length(stream)
        return put(stream, add_trees(index_leading(stream, slot), dx), slot)

    stream = update_if(work.from_stream & work.busy, add_to_slot, state.stream, hint=hint)
    return State(stream, storage, in_flight)


def _input_slot(state: State, t: TickIndex) -> Int[Array, ""]:
    """Returns the slot of the storage that this rank reads at tick `t`."""
    return (t - jnp.minimum(lax.axis_index(AXIS), 1)) % _length(state.storage)


class Condition(NamedTuple):
    """Whether the stream changes in a tick, and a name scope that says in how many ticks it does.

    `holds` is a Python boolean where all ticks of a program agree.
    """

    holds: bool | Bool[Array, ""]
    hint: str = ""

    def update(self, change: Callable, state: PyTree) -> PyTree:
        """Returns `change(state)` if this holds, else `state`."""
        if isinstance(self.holds, bool):
            return change(state) if self.holds else state
        return update_if(self.holds, jax.named_scope(ON_ALL_RANKS)(change), state, hint=self.hint)


class StreamMove(NamedTuple):
    """What the stream does in a tick.

    Attributes:
        moves: Whether a slot moves one rank down, as one of its microbatches or results must.
        leaves: Whether the last rank stores its result in the slot.
    """

    moves: Condition
    leaves: Condition


def stream_move(t: TickIndex, shape: PipelineShape, ticks: range) -> StreamMove:
    """Returns the move of the stream at tick `t`, in a program that runs in all of `ticks`."""
    # The last n microbatches that enter are on rank 0 already. The first n results that leave are
    # the first that the last rank stores: before them its slots have none.
    n, leave = shape.microbatches_per_rank, first_exit(shape)

    def at_t(holds: Callable) -> Condition:
        values = {holds(u) for u in ticks}
        hint = execution_count_hint([[u] for u in ticks], holds)
        return Condition(holds(t) if len(values) > 1 else values.pop(), hint)

    return StreamMove(
        moves=at_t(lambda u: (u < shape.num_microbatches - n) | (u >= leave + n)),
        leaves=at_t(lambda u: u >= leave),
    )


def hand_over(state: State, y: PyTree, t: TickIndex, *, move: StreamMove) -> State:
    """Returns the state at tick `t + 1`: results are sent on, and the stream moves if it must."""
    arrived = join_parts(jax.tree.map(to_next_rank, (*state.in_flight, y)[0]))
    if state.in_flight:
        arrived, y = _after_transfer(arrived, y)
    in_flight = (*state.in_flight, y)[1:]
    storage = put(state.storage, arrived, t % _length(state.storage))
    return State(move_stream(state.stream, y, t, move), storage, in_flight)


def take_back(state: State, t: TickIndex, *, move: StreamMove) -> tuple[State, PyTree]:
    """Transposes `hand_over`: returns the cotangents of the state before it and of `y`."""
    arrived = index_leading(state.storage, t % _length(state.storage))
    *in_flight, dy = jax.tree.map(_to_previous_rank, arrived), *state.in_flight
    stream, dy = _move_back(state.stream, dy, t, move)
    return State(stream, state.storage, tuple(in_flight)), dy


def _after_transfer(transferred: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
    """Returns both; `x` cannot be used before a delayed transfer has ended.

    Otherwise XLA's schedulers put a transfer that only a later tick reads behind all work of its
    tick, where no work is left to hide it.
    """
    return lax.optimization_barrier((transferred, x))


def move_stream(stream: PyTree, y: PyTree, t: TickIndex, move: StreamMove) -> PyTree:
    """Returns the stream after a tick with the result `y`, moved by one slot if `move` says so."""
    slot = t % _length(stream)

    def moved(stream: PyTree) -> PyTree:
        return put(stream, jax.tree.map(_to_previous_rank, index_leading(stream, slot)), slot)

    def stored(stream: PyTree) -> PyTree:
        new = partial(jnp.where, _is_last())
        return put(stream, jax.tree.map(new, join_parts(y), index_leading(stream, slot)), slot)

    return move.leaves.update(stored, move.moves.update(moved, stream))


def _move_back(stream: PyTree, dy: PyTree, t: TickIndex, move: StreamMove) -> tuple[PyTree, PyTree]:
    """Transposes `move_stream`, and adds the cotangent of the stored result to `dy`."""
    slot = t % _length(stream)

    def taken(state: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        stream, dy = state
        result = index_leading(stream, slot)
        remaining = put(stream, _where(~_is_last(), result), slot)
        return remaining, add_trees(dy, _where(_is_last(), result))

    def moved(stream: PyTree) -> PyTree:
        return put(stream, jax.tree.map(to_next_rank, index_leading(stream, slot)), slot)

    stream, dy = move.leaves.update(taken, (stream, dy))
    return move.moves.update(moved, stream), dy


def _is_last() -> Bool[Array, ""]:
    return lax.axis_index(AXIS) == lax.axis_size(AXIS) - 1


def _length(tree: PyTree) -> int:
    return jax.tree.leaves(tree)[0].shape[0]


def _where(condition: Bool[Array, ""], x: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.where(condition, leaf, jnp.zeros_like(leaf)), x)


def to_next_rank(x: jax.Array) -> jax.Array:
    ranks = lax.axis_size(AXIS)
    return lax.ppermute(x, AXIS, [(r, (r + 1) % ranks) for r in range(ranks)])


def _to_previous_rank(x: jax.Array) -> jax.Array:
    ranks = lax.axis_size(AXIS)
    return lax.ppermute(x, AXIS, [((r + 1) % ranks, r) for r in range(ranks)])


def realign(stream: PyTree, shape: PipelineShape) -> PyTree:
    """Returns the stream turned so that slot i of rank r holds microbatch `r * n + i` again.

    Microbatch m leaves at tick m + c and is written to slot (m + c) % n. So only the slots have to
    be rolled: each rank already holds its own microbatches.
    """
    return roll_slots(stream, -first_exit(shape))


def first_exit(shape: PipelineShape) -> int:
    """Returns the tick in which microbatch 0 leaves the last rank."""
    return shape.num_ticks - shape.num_microbatches


def roll_slots(stream: PyTree, by: int, dim: int = 0) -> PyTree:
    """Rolls dim `dim` of every leaf, the slots, by `by`: up if it is positive."""

    def roll(x: jax.Array) -> jax.Array:
        shift = abs(by) % x.shape[dim]
        return jnp.roll(x, shift if by > 0 else -shift, axis=dim)

    return jax.tree.map(roll, stream)
