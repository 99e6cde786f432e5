"""How a rank that works on its chunks in any order gets at their weights, and adds up gradients.

|        | held                         | enter            | read    | add             |
|--------|------------------------------|------------------|---------|-----------------|
| tick   | gradients as stored          |                  | gathers | reduce-scatters |
| once   | gradients, whole             |                  |         |                 |
| repeat | windows, a whole gradient,   | moves a window,  |         | reduce-scatters |
|        | gradients as stored          | gathers ahead    |         | after a visit   |
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from ..autodiff import at, floating
from ..schedules import AHEAD, OF_FORWARD
from ._circular import put
from ._gather import Gather, wide
from ._ranks import AXIS, either, zeros

Held = Any
"""What a rank carries from tick to tick: gradients, and windows if there are any."""
Work = Any
"""`schedules.Work` with the integers of one tick and rank."""


class Chunks(NamedTuple):
    """The weights of a rank's chunks.

    Attributes:
        start: From whether a backward follows to what is held at first.
        enter: `(held, work, is_forward) -> held`, before an F, B or I.
        read: `(held, work, is_forward) -> weights` of its stage.
        add: `(held, work, f) -> (held, result)`, where `f` takes the gradient of a stage and
            returns it with more added, and a result.
        leave: `(held, work) -> held`, after a B.
        close: From what is held at last to gradients as they are stored.
    """

    start: Callable[[bool], Held]
    enter: Callable[[Held, Work, bool], Held]
    read: Callable[[Held, Work, bool], PyTree]
    add: Callable[[Held, Work, Callable], tuple[Held, PyTree]]
    leave: Callable[[Held, Work], Held]
    close: Callable[[Held], PyTree]


def chunks_of(gather: Gather, weights: PyTree, first: tuple[int, ...]) -> Chunks:
    """Access to weights with [v, ...] leaves; `first` is where each rank begins."""
    match gather.when:
        case "tick":
            return _each_tick(gather, weights)
        case "once":
            return _once(gather, weights)
        case "repeat":
            return _each_visit(gather, weights, first)


def _same(held: Held, work: Work, is_forward: bool = True) -> Held:
    del work, is_forward
    return held


def _once(gather: Gather, weights: PyTree) -> Chunks:
    copy = jax.vmap(lambda w: gather.whole(gather.cast(w)))(weights)

    def start(keep: bool) -> Held:
        return jax.vmap(gather.hold)(_zeros(wide(floating(copy)))) if keep else ()

    def read(held: Held, work: Work, is_forward: bool) -> PyTree:
        del held, is_forward
        return at(copy, work.chunk)

    def add(held: Held, work: Work, f: Callable) -> tuple[Held, PyTree]:
        gradient, result = f(at(held, work.chunk))
        return put(held, gradient, work.chunk), result

    return Chunks(start, _same, read, add, _same, jax.vmap(gather.scatter))


def _each_tick(gather: Gather, weights: PyTree) -> Chunks:
    def gathered(chunk: Any) -> PyTree:
        return gather.whole(gather.cast(at(weights, chunk)))

    def gradient() -> PyTree:
        return gather.hold(_zeros(wide(floating(gathered(0)))))

    def start(keep: bool) -> Held:
        return _room(gather.scatter(gradient()), weights) if keep else ()

    def read(held: Held, work: Work, is_forward: bool) -> PyTree:
        del held, is_forward
        return gathered(work.chunk)

    def add(held: Held, work: Work, f: Callable) -> tuple[Held, PyTree]:
        new, result = f(gradient())
        total = jax.tree.map(jnp.add, at(held, work.chunk), gather.scatter(new))
        return put(held, total, work.chunk), result

    return Chunks(start, _same, read, add, _same, lambda held: held)


class _Windows(NamedTuple):
    """What a rank holds of its visits.

    Attributes:
        forward: Weights of the forward's visit.
        backward: Of the backward's.
        ahead: Of the next visit of either.
        gradient: Of the backward's visit, whole.
        done: Gradients of earlier visits, as they are stored.
    """

    forward: PyTree
    backward: PyTree
    ahead: PyTree
    gradient: PyTree
    done: PyTree


def _each_visit(gather: Gather, weights: PyTree, first: tuple[int, ...]) -> Chunks:
    def gathered(chunk: Any) -> PyTree:
        return gather.whole(gather.cast(at(weights, chunk)))

    def start(keep: bool) -> _Windows:
        ahead = gathered(jnp.asarray(first)[lax.axis_index(AXIS)])
        nothing = _zeros(ahead)
        if not keep:
            return _Windows(nothing, (), ahead, (), ())
        gradient = gather.hold(_zeros(wide(floating(ahead))))
        done = _room(gather.scatter(gradient), weights)
        return _Windows(nothing, nothing, ahead, gradient, done)

    def enter(held: _Windows, work: Work, is_forward: bool) -> _Windows:
        side = "forward" if is_forward else "backward"

        def begin(window: PyTree, ahead: PyTree) -> tuple[PyTree, PyTree]:
            # Nothing of this visit waits for what comes next.
            del window
            following = either(
                work.following >= 0, lambda: gathered(work.following), lambda: ahead, like=ahead
            )
            return ahead, following

        pair = getattr(held, side), held.ahead
        window, ahead = either(work.source == AHEAD, begin, lambda *a: a, *pair, like=pair)
        if not is_forward:
            shared = work.source == OF_FORWARD
            window = either(shared, lambda: held.forward, lambda: window, like=window)
        return held._replace(**{side: window, "ahead": ahead})

    def read(held: _Windows, work: Work, is_forward: bool) -> PyTree:
        del work
        return held.forward if is_forward else held.backward

    def add(held: _Windows, work: Work, f: Callable) -> tuple[_Windows, PyTree]:
        del work
        gradient, result = f(held.gradient)
        return held._replace(gradient=gradient), result

    def leave(held: _Windows, work: Work) -> _Windows:
        def scatter(gradient: PyTree, done: PyTree) -> tuple[PyTree, PyTree]:
            total = jax.tree.map(jnp.add, at(done, work.chunk), gather.scatter(gradient))
            return _zeros(gradient), put(done, total, work.chunk)

        pair = held.gradient, held.done
        gradient, done = either(work.closes == 1, scatter, lambda *a: a, *pair, like=pair)
        return held._replace(gradient=gradient, done=done)

    return Chunks(start, enter, read, add, leave, lambda held: held.done)


def _zeros(tree: PyTree) -> PyTree:
    return jax.tree.map(zeros, tree)


def _room(gradient: PyTree, weights: PyTree) -> PyTree:
    """Zeros like the gradient of a stage, [v, ...]."""
    count = jax.tree.leaves(weights)[0].shape[0]
    return jax.tree.map(lambda x: zeros(x, lead=(count,)), gradient)
