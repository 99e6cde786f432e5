"""Building blocks of one iteration of the circular pipeline on whole arrays.

The functions of `circular_engine/_shape.py`, run on all ranks, with the state and the names of
MaxText: S ranks, R repeats, M microbatches, d ticks for a hand-over. An iteration is a tick. Dim 0
of every buffer holds one entry per rank.

While rank 0 is in repeat r, no rank is in another repeat than r - 1 or r. The window of weights
holds both, gathered: [2, S, ...] leaves, entry 0 of repeat r - 1, entry 1 of repeat r.
`WeightGather.prefetch` gathers both.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int, PyTree

from ...autodiff.staged_model import fold_in_microbatch, index_leading, with_aux
from ...sharding.specs import typed_by_specs
from .._buffers import put
from ..circular_engine import (
    Condition,
    PipelineShape,
    StreamMove,
    first_exit,
    move_stream,
    roll_slots,
    to_next_rank,
    work_at,
    work_of_rank,
)
from ..ranks import AXIS, on_ranks
from ..weight_gather import WeightGather

LoopState = dict[str, Any]
"""The buffers between two iterations, see `init_states`."""


def need_circ_storage(shape: PipelineShape) -> bool:
    """Returns whether results of the last rank are stored until rank 0 begins its next repeat."""
    return (
        shape.num_repeats > 1 and shape.num_microbatches > shape.num_ranks * shape.forwarding_delay
    )


def iterations_of_one_repeat(shape: PipelineShape) -> int:
    """Returns d * (S - 1), the iterations before the last rank runs its first microbatch."""
    return shape.forwarding_delay * (shape.num_ranks - 1)


def iterations_of_first_microbatch(shape: PipelineShape) -> int:
    """Returns M * (R - 1) + d * (S - 1), the iterations before microbatch 0 leaves."""
    return first_exit(shape)


def microbatch_and_repeat_ids(
    t: int | Int[Array, ""], shape: PipelineShape
) -> tuple[Int[Array, " S"], Int[Array, " S"]]:
    """Returns the microbatch and the repeat of every rank; 0 and 0 on ranks that have not begun."""
    work = work_of_rank(t, jnp.arange(shape.num_ranks), shape)
    has_begun = work.repeat >= 0
    return jnp.where(has_begun, work.microbatch, 0), jnp.where(has_begun, work.repeat, 0)


def init_states(
    inputs: PyTree, keys: PyTree, shape: PipelineShape, is_stored: bool | None = None
) -> LoopState:
    """Returns the buffers before iteration 0, of `inputs` and `keys` [R, S, ...] or ().

    Returns:
        A dict. `state_io` [S, M / S, ...]: inputs not taken yet, then outputs. `shift` [S, ...]:
        results that the rank before has handed over. `prev_outputs` [S, ...]: results still to be
        handed over, None without delay. `circ_storage` [S, M, ...]: results of the last rank, until
        rank 0 reads them in its next repeat; `circ_storage_mover` [S, ...]: the last results, which
        MaxText stores one iteration later, and `new_loop_state` at once; both None if not
        `is_stored`. `loop_iteration`: 0. `keys` as given. Buffers are zeros, and are written before
        they are read.
    """

    def zeros(*dims):
        return jax.tree.map(lambda x: jnp.zeros((*dims, *x.shape[1:]), x.dtype), inputs)

    S, is_stored = shape.num_ranks, need_circ_storage(shape) if is_stored is None else is_stored
    return {
        "state_io": jax.tree.map(lambda x: x.reshape(S, -1, *x.shape[1:]), inputs),
        "shift": zeros(S),
        "prev_outputs": zeros(S) if shape.forwarding_delay > 1 else None,
        "circ_storage": zeros(S, shape.num_microbatches) if is_stored else None,
        "circ_storage_mover": zeros(S) if is_stored else None,
        "loop_iteration": jnp.int32(0),
        "keys": keys,
    }


def _on_ranks(f: Callable, *, mesh: Mesh | None, in_dims: tuple, out_dims: int) -> Callable:
    """Returns `on_ranks` of `f`, with arguments split over the ranks in explicit axes too.

    A caller by hand may have made them on all devices, and from jax 0.12 on their types must agree.
    """
    run = on_ranks(f, mesh=mesh, in_dims=in_dims, out_dims=out_dims)

    def typed(tree: PyTree, dim: int | None) -> PyTree:
        if dim is None:
            return tree
        spec = PartitionSpec(*[None] * dim, AXIS)
        return typed_by_specs(tree, jax.tree.map(lambda _: spec, tree), mesh)

    return lambda *arguments: run(*map(typed, arguments, in_dims))


def iteration_inputs(
    t: int | Int[Array, ""],
    state_io: PyTree,
    circ_storage: PyTree,
    shift: PyTree,
    shape: PipelineShape,
    mesh: Mesh | None = None,
) -> PyTree:
    """Returns the stage inputs of all ranks at iteration `t`: [S, ...] leaves like `shift`.

    Rank 0 takes a new microbatch, or a result of the last rank. A rank in a bubble runs on a
    microbatch of its own part of `state_io`, and the result is dropped.
    """

    def rank(state_io, circ_storage, shift, t):
        handed_over = shift
        if circ_storage is not None:
            is_first, slot = lax.axis_index(AXIS) == 0, t % shape.num_microbatches
            returned = index_leading(circ_storage, slot)
            handed_over = jax.tree.map(partial(jnp.where, is_first), returned, shift)
        new = index_leading(state_io, t % shape.microbatches_per_rank)
        return jax.tree.map(partial(jnp.where, work_at(t, shape).from_stream), new, handed_over)

    run = _on_ranks(rank, mesh=mesh, in_dims=(0, 0, 0, None), out_dims=0)
    return run(state_io, circ_storage, shift, jnp.int32(t))


def new_loop_state(
    output: PyTree, loop_state: LoopState, shape: PipelineShape, mesh: Mesh | None = None
) -> LoopState:
    """Returns the buffers after an iteration, with the shapes of `loop_state`."""

    def rank(state_io, circ_storage, sent, y, t):
        shift = jax.tree.map(to_next_rank, sent)
        if circ_storage is not None:
            slot = (t + shape.ticks_until_read) % shape.num_microbatches
            circ_storage = put(circ_storage, shift, slot)
        always = StreamMove(moves=Condition(True), leaves=Condition(True))
        return move_stream(state_io, y, t, always), circ_storage, shift

    t, delayed = loop_state["loop_iteration"], loop_state["prev_outputs"]
    run = _on_ranks(rank, mesh=mesh, in_dims=(0, 0, 0, 0, None), out_dims=0)
    state_io, circ_storage, shift = run(
        loop_state["state_io"],
        loop_state["circ_storage"],
        output if delayed is None else delayed,
        output,
        t,
    )
    return loop_state | {
        "state_io": state_io,
        "shift": shift,
        "prev_outputs": None if delayed is None else output,
        "circ_storage": circ_storage,
        "circ_storage_mover": None if circ_storage is None else output,
        "loop_iteration": t + 1,
    }


def permute_output(
    output: PyTree, shape: PipelineShape, first_iteration: int | None = None
) -> PyTree:
    """Rolls `state_io` after the last iteration to the inputs' order."""
    first = iterations_of_first_microbatch(shape) if first_iteration is None else first_iteration
    return roll_slots(output, -first, dim=1)


def take_per_rank(xs: PyTree, ids: Int[Array, " S"], dim: int = 0) -> PyTree:
    """Takes entry `ids[r]` of `dim` for every rank r: that dim becomes [S]."""
    return jax.tree.map(lambda x: jnp.take(x, ids, axis=dim, mode="clip"), xs)


def take_repeats(
    weights: PyTree,
    ids: Int[Array, " S"],
    repeat_dim: int = 0,
    stages_dim: int = 1,
    mesh: Mesh | None = None,
) -> PyTree:
    """Takes entry `ids[r]` of `repeat_dim` from rank r's part of every leaf and drops that dim."""
    seen_dim = repeat_dim - (stages_dim < repeat_dim)

    def take(weights, repeat):
        return jax.tree.map(
            lambda w: lax.dynamic_index_in_dim(w, repeat, seen_dim, keepdims=False), weights
        )

    out_dim = stages_dim - (repeat_dim < stages_dim)
    return _on_ranks(take, mesh=mesh, in_dims=(stages_dim, 0), out_dims=out_dim)(weights, ids)


def keys_of_iteration(
    keys: PyTree,
    microbatches: Int[Array, " S"],
    repeats: Int[Array, " S"],
    mesh: Mesh | None = None,
) -> PyTree:
    """Returns the [S, ...] dropout keys of all ranks, with the microbatch folded in; () for ()."""
    taken = take_repeats(keys, repeats, mesh=mesh)
    return jax.vmap(fold_in_microbatch)(taken, microbatches)


def run_stages(stage: Callable, mesh: Mesh | None = None) -> Callable:
    """Returns `(weights, x, batch_inputs, rng) -> y`, all [S, ...]: `stage` on all ranks."""
    stage = with_aux(stage)

    def rank(weights, x, batch_inputs, rng):
        return stage(weights, x, batch_inputs, rng)[0]

    return _on_ranks(rank, mesh=mesh, in_dims=(0, 0, 0, 0), out_dims=0)


def repeat_of_rank_0(t: int | Int[Array, ""], shape: PipelineShape) -> Int[Array, " S"]:
    """Returns [S] the repeat, in range, that rank 0 runs at iteration `t`."""
    repeat = jnp.clip(t // shape.num_microbatches, 0, shape.num_repeats - 1)
    return jnp.broadcast_to(repeat, (shape.num_ranks,))


def window_at(gather: WeightGather, t: int | Int[Array, ""], shape: PipelineShape) -> PyTree:
    """Returns the [2, S, ...] window for the repeat that rank 0 begins at iteration `t`.

    `gather` has the functions of whole weights; its `prefetch` takes an iteration, and returns the
    [S, ...] weights of the repeat that rank 0 runs then.
    """
    repeats = gather.prefetch(t - shape.num_microbatches), gather.prefetch(t)
    return jax.tree.map(lambda *halves: jnp.stack(halves), *repeats)


def empty_window(weights: PyTree) -> PyTree:
    """Returns zeros like a window of these [R, S, ...] weights."""
    return jax.tree.map(lambda w: jnp.zeros((2, *w.shape[1:]), w.dtype), weights)


def from_window(window: PyTree, repeats: Int[Array, " S"]) -> PyTree:
    """Returns the [S, ...] weights of all ranks out of a [2, S, ...] window."""

    def choose(blocks):
        is_current = (repeats == repeats[0]).reshape(-1, *[1] * (blocks.ndim - 2))
        return jnp.where(is_current, blocks[1], blocks[0])

    return jax.tree.map(choose, window)
