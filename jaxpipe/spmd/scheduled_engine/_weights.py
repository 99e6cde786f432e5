"""The weights and gradient sums that a rank carries from tick to tick, and copies of weights.

A rank runs its chunks in any order. `ScheduledWeights` applies the rank's `WeightGather` to the
chunk of a row: in every tick, or, with a prefetch plan, whenever the rank changes chunks.

|        | state              | prefetch       | unshard  | accumulate      | reduce_scatter      |
|--------|--------------------|----------------|----------|-----------------|---------------------|
| tick   | stored gradients   |                | gathers  | reduce-scatters |                     |
| once   | whole gradients    |                | a copy   | the last one of |                     |
|        |                    |                |          | a chunk reduce- |                     |
|        |                    |                |          | scatters        |                     |
| repeat | windows, one whole | gathers,       | a window |                 | reduce-scatters     |
|        | gradient, others   | moves a window |          |                 | after a residency   |
|        | stored             |                |          |                 |                     |

Forwards need no sums: a loop over ticks in which backwards run is given them, and they are taken
when it ends.

Weights are stored once. Before the first tick a rank receives the weights of the stages that it
runs and does not store, in one permutation of the ranks where, as in DualPipe, it copies one stage;
after the last tick the gradients of copies are sent back and added. Shards over other axes are sent
as they are stored.

v chunks that a rank stores, c chunks that it runs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree, Shaped

from ...autodiff.staged_model import index_leading
from ...schedules.lock_step import PREFETCHED, SHARED_WITH_FORWARD, TickTables, WeightCopies
from .._buffers import over_leading, put
from ..ranks import AXIS, cond, execution_count_hint, update_if, zeros_like
from ..weight_gather import Gather, WeightGather, read_after, weight_gather
from ._rows import PhaseRow


class ScheduledWeights(NamedTuple):
    """Functions of the table above.

    `state` is what a rank carries from tick to tick: sums of gradients, and with "repeat" also
    windows of weights.

    `tables` are those of the loop that runs.

    Attributes:
        init: Returns the state before the first tick, without sums.
        with_sums: `(state, tables) -> state`, before a loop in which backwards run, with zeros for
            the sums of its chunks.
        take_sums: `state -> (state without sums, sums)`, after such a loop.
        prefetch: `(state, tables, work, is_forward) -> state`, before an F, B or I.
        unshard: `(state, work, is_forward) -> weights` of its stage.
        entries: The same, or in place of weights the entries of the buffers that hold them.
        scatters_last: Whether the addition that completes the gradients of a chunk scatters them,
            and so is another program than the others.
        accumulate: `(state, work, f, completes_chunk) -> (state, result)`, where `f` maps the
            gradient of a stage, and the `finish` of `ir.transforms.accumulate` or None, to this
            gradient with more added, and a result. `f` may be given entries of buffers; it then
            returns their buffers.
        reduce_scatter: `(state, tables, work) -> state`, after a B.
        finish: `sums -> gradients`, of all chunks after the last tick, sharded as they are stored.
    """

    init: Callable[[], PyTree]
    with_sums: Callable[[PyTree, TickTables], PyTree]
    take_sums: Callable[[PyTree], tuple[PyTree, PyTree]]
    prefetch: Callable[[PyTree, TickTables, PhaseRow, bool], PyTree]
    unshard: Callable[[PyTree, PhaseRow, bool], PyTree]
    entries: Callable[[PyTree, PhaseRow, bool], PyTree]
    scatters_last: bool
    accumulate: Callable[[PyTree, PhaseRow, Callable, bool], tuple[PyTree, PyTree]]
    reduce_scatter: Callable[[PyTree, TickTables, PhaseRow], PyTree]
    finish: Callable[[PyTree], PyTree]


def scheduled_weights(gather: Gather, weights: PyTree, tables: TickTables) -> ScheduledWeights:
    """Returns the functions of `ScheduledWeights` for weights with [v, ...] leaves.

    `tables` are those of all ticks.
    """
    if gather.when == "repeat":
        return _by_residency(
            weight_gather(gather, weights, read=read_after),
            tables.first_chunks,
            separate=tables.separate_backward_weights,
        )
    return _per_action(weight_gather(gather, weights))


def _unchanged(
    state: PyTree, tables: TickTables, work: PhaseRow, is_forward: bool = True
) -> PyTree:
    del tables, work, is_forward
    return state


def _per_action(gather: WeightGather) -> ScheduledWeights:
    """Looks up weights and sums of gradients of the chunk in every tick; the state is the sums."""

    def with_sums(state: PyTree, tables: TickTables) -> PyTree:
        del state, tables
        return gather.zero_sums()

    def unshard(state: PyTree, work: PhaseRow, is_forward: bool) -> PyTree:
        del state, is_forward
        return gather.unshard(gather.window(gather.prefetch(work.chunk), work.chunk))

    def entries(state: PyTree, work: PhaseRow, is_forward: bool) -> PyTree:
        return gather.entries(work.chunk) if gather.entries else unshard(state, work, is_forward)

    scatters = gather.scatter_slices

    def accumulate(
        state: PyTree, work: PhaseRow, f: Callable, completes_chunk: bool
    ) -> tuple[PyTree, PyTree]:
        add = partial(f, finish=scatters if completes_chunk else None)
        return gather.accumulate_in_place(state, work.chunk, add)

    return ScheduledWeights(
        init=tuple,
        with_sums=with_sums,
        take_sums=lambda sums: ((), sums),
        prefetch=_unchanged,
        unshard=unshard,
        entries=entries,
        scatters_last=any(scatters),
        accumulate=accumulate,
        reduce_scatter=_unchanged,
        finish=partial(over_leading, lambda sums: gather.finish(gather.scattered(sums))),
    )


class _WeightWindows(NamedTuple):
    """Gathered weights and gradients that a rank holds.

    A residency is a range of ticks in which the rank runs the forward, or the backward, of one
    chunk (`schedules.lock_step.ChunkResidency`).

    Attributes:
        backward: Weights of the backward's residency; () if it reads those of `forward`.
        prefetched: Weights of the next residency of either.
        gradient: The sum of the gradients of the backward's residency; None before the first loop
            in which backwards run.
        done: [chunks, ...] sums of the gradients of earlier residencies, sharded as they are
            stored, of the chunks that the loop completes; None where no backwards run.
    """

    forward: PyTree
    backward: PyTree
    prefetched: PyTree
    gradient: PyTree = None
    done: PyTree = None


def _by_residency(
    gather: WeightGather, first_chunks: tuple[int, ...], *, separate: bool
) -> ScheduledWeights:
    """Holds windows, which the rank changes by the prefetch plan of the tables.

    They are `separate` if the backward has windows of its own.
    """

    def init() -> _WeightWindows:
        prefetched = gather.prefetch(jnp.asarray(first_chunks)[lax.axis_index(AXIS)])
        zero_weights = zeros_like(prefetched)
        return _WeightWindows(zero_weights, zero_weights if separate else (), prefetched)

    def with_sums(state: _WeightWindows, tables: TickTables) -> _WeightWindows:
        gradient = state.gradient  # of a residency that the loop before has begun
        if gradient is None:
            gradient = gather.zero_unsharded(state.prefetched)
        return state._replace(gradient=gradient, done=gather.zero_gradients(len(tables.chunks)))

    def take_sums(state: _WeightWindows) -> tuple[_WeightWindows, PyTree]:
        return state._replace(done=None), state.done

    def prefetch(
        state: _WeightWindows, tables: TickTables, work: PhaseRow, is_forward: bool
    ) -> _WeightWindows:
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
        return "backward" if separate and not is_forward else "forward"

    def accumulate(
        state: _WeightWindows, work: PhaseRow, f: Callable, completes_chunk: bool
    ) -> tuple[_WeightWindows, PyTree]:
        del work, completes_chunk
        gradient, result = f(state.gradient, None)
        return state._replace(gradient=gradient), result

    def reduce_scatter(state: _WeightWindows, tables: TickTables, work: PhaseRow) -> _WeightWindows:
        """Reduce-scatters one weight after the other, to keep temporary buffers small."""
        gradients, tree = jax.tree.flatten(state.gradient)
        done, chunk = jax.tree.leaves(state.done), work.chunk - tables.chunks.start

        def scatter(i: int, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            gradient, done = pair
            alone = tree.unflatten(gradient if j == i else None for j in range(len(gradients)))
            (scattered,) = jax.tree.leaves(gather.reduce_scatter(alone))
            return jnp.zeros_like(gradient), put(
                done, index_leading(done, chunk) + scattered, chunk
            )

        hint = execution_count_hint(tables.backward.ends_residency, lambda ends: ends == 1)
        pairs = [
            update_if(work.ends_residency == 1, partial(scatter, i), pair, hint=hint)
            for i, pair in enumerate(zip(gradients, done, strict=True))
        ]
        gradients, done = (tree.unflatten(leaves) for leaves in zip(*pairs, strict=True))
        return state._replace(gradient=gradients, done=done)

    return ScheduledWeights(
        init=init,
        with_sums=with_sums,
        take_sums=take_sums,
        prefetch=prefetch,
        unshard=unshard,
        entries=unshard,
        scatters_last=False,
        accumulate=accumulate,
        reduce_scatter=reduce_scatter,
        finish=partial(over_leading, gather.finish),
    )


def receive_copies(
    stored: PyTree[Shaped[Array, "v ..."]], copies: WeightCopies | None
) -> PyTree[Shaped[Array, "c ..."]]:
    """Returns the chunks that this rank runs."""
    if copies is None:
        return stored
    chunks = _of_rank(copies.chunks, axis=1)

    def receive(leaf: jax.Array) -> jax.Array:
        run = [index_leading(leaf, jnp.maximum(chunk, 0)) for chunk in chunks]
        for sent in copies.rounds:
            received = _permute(index_leading(leaf, _of_rank(sent.stored_chunks)), sent.receivers)
            target = _of_rank(sent.copied_chunks)
            run = [jnp.where(target == chunk, received, w) for chunk, w in enumerate(run)]
        return jnp.stack(run)

    return jax.tree.map(_on_key_data(receive), stored)


def return_gradients(
    gradients: PyTree[Shaped[Array, "c ..."]], copies: WeightCopies | None
) -> PyTree[Shaped[Array, "v ..."]]:
    """Returns the gradients of the chunks that this rank stores, summed over all ranks."""
    if copies is None:
        return gradients
    run_chunks = _of_rank(_run_chunks(copies), axis=1)

    def give_back(leaf: jax.Array) -> jax.Array:
        total = _take(leaf, run_chunks)
        for sent in copies.rounds:
            target, source = _of_rank(sent.copied_chunks), _of_rank(sent.stored_chunks)
            own = index_leading(leaf, target)
            senders = tuple(sent.receivers.index(rank) for rank in range(len(sent.receivers)))
            returned = _permute(jnp.where(target >= 0, own, jnp.zeros_like(own)), senders)
            total = put(total, index_leading(total, source) + returned, source)
        return total

    return jax.tree.map(give_back, gradients)


def _run_chunks(copies: WeightCopies) -> list[list[int]]:
    """Returns [v][ranks]: which of the chunks that a rank runs each chunk is that it stores."""
    by_rank = list(zip(*copies.chunks, strict=True))
    num_stored = 1 + max(by_rank[0])
    return [[chunks.index(stored) for chunks in by_rank] for stored in range(num_stored)]


def _take(leaf: jax.Array, chunks: jax.Array) -> jax.Array:
    return jnp.stack([index_leading(leaf, chunk) for chunk in chunks])


def _permute(x: jax.Array, receivers: tuple[int, ...]) -> jax.Array:
    return lax.ppermute(x, AXIS, list(enumerate(receivers)))


def _of_rank(table: Any, axis: int = 0) -> jax.Array:
    """Returns this rank's entry of a table of integers, along the dim of ranks."""
    return jnp.take(jnp.asarray(table, jnp.int32), lax.axis_index(AXIS), axis=axis)


def _on_key_data(f: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that applies `f` to the integers of random keys, which ranks can send."""

    def apply(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return f(leaf)
        return jax.random.wrap_key_data(
            f(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf)
        )

    return apply
