"""The stream of a circular pipeline, seen by one rank: how its slots move, and the transpose.

In a tick in which microbatches enter or leave, one slot of every rank moves one rank down, and
rank 0's goes to the last rank, which stores its result there if microbatches leave. All ranks
agree in which ticks that is, so the permute may be under a condition.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree

from ...autodiff.staged_model import index_leading
from .._buffers import put
from ..ranks import AXIS, update_if

TickIndex = int | Int[Array, ""]
"""Index of a tick; a Python integer where ticks are unrolled."""


class StreamMove(NamedTuple):
    """What the stream does in a tick. Python booleans where all ticks of a program do the same.

    Attributes:
        moves: Whether it moves one rank down, because microbatches enter or leave.
        leaves: Whether the last rank stores its result in the slot that becomes free.
        hint: A name scope that says in how many ticks it moves, for audits of the program.
    """

    moves: bool | Bool[Array, ""]
    leaves: bool | Bool[Array, ""]
    hint: str = ""


def move_stream(stream: PyTree, y: PyTree, t: TickIndex, move: StreamMove) -> PyTree:
    """Returns the stream after a tick with the result `y`, moved by one slot if `move` says so."""

    def moved(stream: PyTree) -> PyTree:
        slot = t % length(stream)
        new = jax.tree.map(to_previous_rank, index_leading(stream, slot))
        stored = _is_last() & move.leaves
        return put(stream, jax.tree.map(lambda y, x: jnp.where(stored, y, x), y, new), slot)

    return _if_moves(move, moved, stream)


def move_back(stream: PyTree, dy: PyTree, t: TickIndex, move: StreamMove) -> tuple[PyTree, PyTree]:
    """Transposes `move_stream`, and adds the cotangent of the stored result to `dy`."""

    def moved(state: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        stream, dy = state
        slot = t % length(stream)
        new, stored = index_leading(stream, slot), _is_last() & move.leaves
        before = jax.tree.map(to_next_rank, where(~stored, new))
        return put(stream, before, slot), plus(dy, where(stored, new))

    return _if_moves(move, moved, (stream, dy))


def _if_moves(move: StreamMove, moved: Callable, state: PyTree) -> PyTree:
    if isinstance(move.moves, bool):
        return moved(state) if move.moves else state
    return update_if(move.moves, moved, state, hint=move.hint)


def _is_last() -> Bool[Array, ""]:
    return lax.axis_index(AXIS) == lax.axis_size(AXIS) - 1


def length(tree: PyTree) -> int:
    return jax.tree.leaves(tree)[0].shape[0]


def where(condition: Bool[Array, ""], x: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.where(condition, leaf, jnp.zeros_like(leaf)), x)


def plus(a: PyTree, b: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, a, b)


def to_next_rank(x: jax.Array) -> jax.Array:
    ranks = lax.axis_size(AXIS)
    return lax.ppermute(x, AXIS, [(r, (r + 1) % ranks) for r in range(ranks)])


def to_previous_rank(x: jax.Array) -> jax.Array:
    ranks = lax.axis_size(AXIS)
    return lax.ppermute(x, AXIS, [((r + 1) % ranks, r) for r in range(ranks)])
