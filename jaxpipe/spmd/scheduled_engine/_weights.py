"""Weight gathers and gradient sums of a rank that runs its chunks in any order.

|        | held                  | enter          | read      | add             | leave, close    |
|--------|-----------------------|----------------|-----------|-----------------|-----------------|
| tick   | gradients as stored   |                | gathers   | reduce-scatters |                 |
| once   | gradients, whole      |                | of a copy |                 | reduce-scatters |
| repeat | windows, a gradient   | gathers ahead, | a window  |                 | reduce-scatters |
|        | whole, others stored  | moves a window |           |                 | after a visit   |
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from ...autodiff._model import index_leading
from ...autodiff._pullback import floating
from ...schedules.lock_step import PREFETCHED, SHARED_WITH_FORWARD, TickTables
from .._ranks import AXIS
from .._varying import cond, execution_count_hint, zeros
from .._weight_gather import Gather, only_after, wide
from ..circular_engine._shape import put

Held = Any
"""Carry of a rank from tick to tick: gradients, and with "repeat" windows of weights."""
Work = Any
"""`PhaseTable` with the integers of one tick and rank."""


class Chunks(NamedTuple):
    """Functions of the table above, for the weights of a rank's chunks.

    Attributes:
        start: `(whether a backward follows) -> held`, before the first tick.
        enter: `(held, work, is_forward) -> held`, before an F, B or I.
        read: `(held, work, is_forward) -> weights` of its stage.
        add: `(held, work, f) -> (held, result)`, where `f` takes the gradient of a stage and
            returns it with more added, and a result.
        leave: `(held, work) -> held`, after a B.
        close: `held -> gradients`, after the last tick, sharded as they are stored.
    """

    start: Callable[[bool], Held]
    enter: Callable[[Held, Work, bool], Held]
    read: Callable[[Held, Work, bool], PyTree]
    add: Callable[[Held, Work, Callable], tuple[Held, PyTree]]
    leave: Callable[[Held, Work], Held]
    close: Callable[[Held], PyTree]


def chunks_of(gather: Gather, weights: PyTree, tables: TickTables) -> Chunks:
    """Returns the functions of `Chunks` for weights with [v, ...] leaves."""
    match gather.when:
        case "tick":
            return _each_tick(gather, weights)
        case "once":
            return _once(gather, weights)
        case "repeat":
            return _each_visit(gather, weights, tables)


def _same(held: Held, work: Work, is_forward: bool = True) -> Held:
    del work, is_forward
    return held


def _once(gather: Gather, weights: PyTree) -> Chunks:
    copy = jax.vmap(lambda w: gather.whole(gather.cast(w)))(weights)

    def start(keep: bool) -> Held:
        return jax.vmap(gather.hold)(_zeros(wide(floating(copy)))) if keep else ()

    def read(held: Held, work: Work, is_forward: bool) -> PyTree:
        del held, is_forward
        return index_leading(copy, work.chunk)

    def add(held: Held, work: Work, f: Callable) -> tuple[Held, PyTree]:
        gradient, result = f(index_leading(held, work.chunk))
        return put(held, gradient, work.chunk), result

    return Chunks(start, _same, read, add, _same, jax.vmap(gather.scatter))


def _each_tick(gather: Gather, weights: PyTree) -> Chunks:
    def gathered(chunk: Any) -> PyTree:
        return gather.whole(gather.cast(index_leading(weights, chunk)))

    def gradient() -> PyTree:
        return gather.hold(_zeros(wide(floating(gathered(0)))))

    def start(keep: bool) -> Held:
        return _room(gather.scatter(gradient()), weights) if keep else ()

    def read(held: Held, work: Work, is_forward: bool) -> PyTree:
        del held, is_forward
        return gathered(work.chunk)

    def add(held: Held, work: Work, f: Callable) -> tuple[Held, PyTree]:
        new, result = f(gradient())
        total = jax.tree.map(jnp.add, index_leading(held, work.chunk), gather.scatter(new))
        return put(held, total, work.chunk), result

    return Chunks(start, _same, read, add, _same, lambda held: held)


class _Windows(NamedTuple):
    """Gathered weights and gradients that a rank holds.

    A visit is a range of ticks in which the rank runs the forward, or the backward, of one chunk.

    Attributes:
        forward: Weights of the forward's visit.
        backward: Weights of the backward's visit; () if it reads those of `forward`.
        ahead: Prefetched weights of the next visit of either.
        gradient: Gradient of the backward's visit, whole.
        done: Sums of the gradients of earlier visits, sharded as they are stored.
    """

    forward: PyTree
    backward: PyTree
    ahead: PyTree
    gradient: PyTree
    done: PyTree


def _each_visit(gather: Gather, weights: PyTree, tables: TickTables) -> Chunks:
    def gathered(chunk: Any) -> PyTree:
        stored = jax.tree.map(partial(only_after, chunk), index_leading(weights, chunk))
        return gather.whole(gather.cast(stored))

    def start(keep: bool) -> _Windows:
        ahead = gathered(jnp.asarray(tables.first_chunks)[lax.axis_index(AXIS)])
        nothing = _zeros(ahead)
        if not keep:
            return _Windows(nothing, (), ahead, (), ())
        gradient = gather.hold(_zeros(wide(floating(ahead))))
        done = _room(gather.scatter(gradient), weights)
        return _Windows(
            nothing, nothing if tables.separate_backward_weights else (), ahead, gradient, done
        )

    def enter(held: _Windows, work: Work, is_forward: bool) -> _Windows:
        side = _side(is_forward)
        window = getattr(held, side)
        begins = work.weight_source == PREFETCHED
        following = (tables.forward if is_forward else tables.backward).prefetch_chunk
        window = cond(begins, lambda: held.ahead, lambda: window, like=window)
        if side == "backward":
            shared = work.weight_source == SHARED_WITH_FORWARD
            window = cond(shared, lambda: held.forward, lambda: window, like=window)
        # Prefetched for the next visit: no tick of this one reads it.
        ahead = cond(
            begins & (work.prefetch_chunk >= 0),
            lambda: gathered(work.prefetch_chunk),
            lambda: held.ahead,
            like=held.ahead,
            hint=execution_count_hint(following),
        )
        return held._replace(**{side: window, "ahead": ahead})

    def read(held: _Windows, work: Work, is_forward: bool) -> PyTree:
        del work
        return getattr(held, _side(is_forward))

    def _side(is_forward: bool) -> str:
        return "forward" if is_forward or not tables.separate_backward_weights else "backward"

    def add(held: _Windows, work: Work, f: Callable) -> tuple[_Windows, PyTree]:
        del work
        gradient, result = f(held.gradient)
        return held._replace(gradient=gradient), result

    def leave(held: _Windows, work: Work) -> _Windows:
        """Reduce-scatters one weight after the other, to keep temporary buffers small."""
        gradients, tree = jax.tree.flatten(held.gradient)
        done = jax.tree.leaves(held.done)

        def scatter(i: int, gradient: jax.Array, done: jax.Array) -> tuple[jax.Array, jax.Array]:
            alone = tree.unflatten(gradient if j == i else None for j in range(len(gradients)))
            (scattered,) = jax.tree.leaves(gather.scatter(alone))
            return jnp.zeros_like(gradient), put(
                done, index_leading(done, work.chunk) + scattered, work.chunk
            )

        hint = execution_count_hint(tables.backward.ends_residency, lambda closes: closes == 1)
        same = lambda *pair: pair  # noqa: E731
        pairs = [
            cond(work.ends_residency == 1, partial(scatter, i), same, *pair, like=pair, hint=hint)
            for i, pair in enumerate(zip(gradients, done, strict=True))
        ]
        gradients, done = (tree.unflatten(leaves) for leaves in zip(*pairs, strict=True))
        return held._replace(gradient=gradients, done=done)

    return Chunks(start, enter, read, add, leave, lambda held: held.done)


def _zeros(tree: PyTree) -> PyTree:
    return jax.tree.map(zeros, tree)


def _room(gradient: PyTree, weights: PyTree) -> PyTree:
    """Returns zeros like the gradient of a stage, with a dim of v chunks in front."""
    count = jax.tree.leaves(weights)[0].shape[0]
    return jax.tree.map(lambda x: zeros(x, lead=(count,)), gradient)
