"""The weights and gradient sums that a rank carries from tick to tick of a schedule.

A rank runs its chunks in any order. `ScheduledWeights` applies the rank's `WeightGather` to the
chunk of a row: in every tick, or, with a prefetch plan, whenever the rank changes chunks.

|        | state              | prefetch       | unshard  | accumulate      | reduce_scatter      |
|--------|--------------------|----------------|----------|-----------------|---------------------|
| tick   | stored gradients   |                | gathers  | reduce-scatters |                     |
| once   | whole gradients    |                | a copy   |                 | reduce-scatters     |
| repeat | windows, one whole | gathers,       | a window |                 | reduce-scatters     |
|        | gradient, others   | moves a window |          |                 | after a residency   |
|        | stored             |                |          |                 |                     |
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from ...autodiff.staged_model import index_leading
from ...schedules.lock_step import PREFETCHED, SHARED_WITH_FORWARD, TickTables
from .._buffers import over_leading, put
from ..ranks import AXIS, cond, execution_count_hint, update_if, zeros_like
from ..weight_gather import Gather, WeightGather, read_after, weight_gather, zeros_of_chunks
from ._rows import PhaseRow


class ScheduledWeights(NamedTuple):
    """Functions of the table above.

    `state` is what a rank carries from tick to tick: sums of gradients, and with "repeat" also
    windows of weights.

    Attributes:
        init: `(whether a backward follows) -> state`, before the first tick.
        prefetch: `(state, work, is_forward) -> state`, before an F, B or I.
        unshard: `(state, work, is_forward) -> weights` of its stage.
        entries: The same, or in place of weights the entries of the buffers that hold them.
        accumulate: `(state, work, f) -> (state, result)`, where `f` maps the gradient of a stage
            to this gradient with more added, and a result. `f` may be given entries of buffers; it
            then returns their buffers.
        reduce_scatter: `(state, work) -> state`, after a B.
        finish: `state -> gradients`, after the last tick, sharded as they are stored.
    """

    init: Callable[[bool], PyTree]
    prefetch: Callable[[PyTree, PhaseRow, bool], PyTree]
    unshard: Callable[[PyTree, PhaseRow, bool], PyTree]
    entries: Callable[[PyTree, PhaseRow, bool], PyTree]
    accumulate: Callable[[PyTree, PhaseRow, Callable], tuple[PyTree, PyTree]]
    reduce_scatter: Callable[[PyTree, PhaseRow], PyTree]
    finish: Callable[[PyTree], PyTree]


def scheduled_weights(gather: Gather, weights: PyTree, tables: TickTables) -> ScheduledWeights:
    """Returns the functions of `ScheduledWeights` for weights with [v, ...] leaves."""
    if gather.when == "repeat":
        return _by_residency(weight_gather(gather, weights, read=read_after), weights, tables)
    return _by_tick(weight_gather(gather, weights))


def _unchanged(state: PyTree, work: PhaseRow, is_forward: bool = True) -> PyTree:
    del work, is_forward
    return state


def _by_tick(gather: WeightGather) -> ScheduledWeights:
    """Looks up weights and gradient sums of the chunk in every tick; the state is all sums."""

    def init(with_gradients: bool) -> PyTree:
        return gather.zero_sums() if with_gradients else ()

    def unshard(state: PyTree, work: PhaseRow, is_forward: bool) -> PyTree:
        del state, is_forward
        return gather.unshard(gather.window(gather.prefetch(work.chunk), work.chunk))

    def entries(state: PyTree, work: PhaseRow, is_forward: bool) -> PyTree:
        return gather.entries(work.chunk) if gather.entries else unshard(state, work, is_forward)

    def accumulate(state: PyTree, work: PhaseRow, f: Callable) -> tuple[PyTree, PyTree]:
        return gather.accumulate_in_place(state, work.chunk, f)

    finish = partial(over_leading, lambda sums: gather.finish(gather.reduce_scatter(sums)))
    return ScheduledWeights(init, _unchanged, unshard, entries, accumulate, _unchanged, finish)


class _WeightWindows(NamedTuple):
    """Gathered weights and gradients that a rank holds.

    A residency is a range of ticks in which the rank runs the forward, or the backward, of one
    chunk (`schedules.lock_step.ChunkResidency`).

    Attributes:
        backward: Weights of the backward's residency; () if it reads those of `forward`.
        prefetched: Weights of the next residency of either.
        done: Sums of the gradients of earlier residencies, sharded as they are stored.
    """

    forward: PyTree
    backward: PyTree
    prefetched: PyTree
    gradient: PyTree
    done: PyTree


def _by_residency(gather: WeightGather, weights: PyTree, tables: TickTables) -> ScheduledWeights:
    """Holds windows, which the rank changes by the prefetch plan of `tables`."""

    def init(with_gradients: bool) -> _WeightWindows:
        prefetched = gather.prefetch(jnp.asarray(tables.first_chunks)[lax.axis_index(AXIS)])
        zero_weights = zeros_like(prefetched)
        if not with_gradients:
            return _WeightWindows(zero_weights, (), prefetched, (), ())
        gradient = gather.zero_unsharded(prefetched)
        done = zeros_of_chunks(gather.reduce_scatter(gradient), weights)
        backward = zero_weights if tables.separate_backward_weights else ()
        return _WeightWindows(zero_weights, backward, prefetched, gradient, done)

    def prefetch(state: _WeightWindows, work: PhaseRow, is_forward: bool) -> _WeightWindows:
        name = _window_name(is_forward)
        window = getattr(state, name)
        phase = tables.forward if is_forward else tables.backward

        def taken(source: int) -> str:
            return execution_count_hint(phase.weight_source, lambda entry: entry == source)

        begins = work.weight_source == PREFETCHED
        window = cond(
            begins, lambda: state.prefetched, lambda: window, like=window, hint=taken(PREFETCHED)
        )
        if name == "backward":
            shared = work.weight_source == SHARED_WITH_FORWARD
            hint = taken(SHARED_WITH_FORWARD)
            window = cond(shared, lambda: state.forward, lambda: window, like=window, hint=hint)
        # Prefetched for the next residency: no tick of this one reads it.
        prefetched = cond(
            begins & (work.prefetch_chunk >= 0),
            lambda: gather.prefetch(work.prefetch_chunk),
            lambda: state.prefetched,
            like=state.prefetched,
            hint=execution_count_hint(phase.prefetch_chunk),
        )
        return state._replace(**{name: window, "prefetched": prefetched})

    def unshard(state: _WeightWindows, work: PhaseRow, is_forward: bool) -> PyTree:
        del work
        return gather.unshard(getattr(state, _window_name(is_forward)))

    def _window_name(is_forward: bool) -> str:
        return "forward" if is_forward or not tables.separate_backward_weights else "backward"

    def accumulate(
        state: _WeightWindows, work: PhaseRow, f: Callable
    ) -> tuple[_WeightWindows, PyTree]:
        del work
        gradient, result = f(state.gradient)
        return state._replace(gradient=gradient), result

    def reduce_scatter(state: _WeightWindows, work: PhaseRow) -> _WeightWindows:
        """Reduce-scatters one weight after the other, to keep temporary buffers small."""
        gradients, tree = jax.tree.flatten(state.gradient)
        done = jax.tree.leaves(state.done)

        def scatter(i: int, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            gradient, done = pair
            alone = tree.unflatten(gradient if j == i else None for j in range(len(gradients)))
            (scattered,) = jax.tree.leaves(gather.reduce_scatter(alone))
            return jnp.zeros_like(gradient), put(
                done, index_leading(done, work.chunk) + scattered, work.chunk
            )

        hint = execution_count_hint(tables.backward.ends_residency, lambda ends: ends == 1)
        pairs = [
            update_if(work.ends_residency == 1, partial(scatter, i), pair, hint=hint)
            for i, pair in enumerate(zip(gradients, done, strict=True))
        ]
        gradients, done = (tree.unflatten(leaves) for leaves in zip(*pairs, strict=True))
        return state._replace(gradient=gradients, done=done)

    def finish(state: _WeightWindows) -> PyTree:
        return over_leading(gather.finish, state.done)

    return ScheduledWeights(init, prefetch, unshard, unshard, accumulate, reduce_scatter, finish)
