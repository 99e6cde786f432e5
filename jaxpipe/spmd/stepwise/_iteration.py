"""Building blocks of one iteration of the circular pipeline on whole arrays.

The same schedule as `circular`, with the state and the names of MaxText: S ranks, R repeats, M
microbatches, d ticks for a hand-over. At iteration t rank r runs its forward k = t - r * d, which
is that of microbatch k % M in repeat k // M. Dim 0 of every buffer holds one entry per rank.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int, PyTree

from ...autodiff.staged_model import fold_in_microbatch, with_aux
from ..circular_engine import PipelineShape
from ..ranks import AXIS, on_ranks

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
    return shape.num_microbatches * (shape.num_repeats - 1) + iterations_of_one_repeat(shape)


def microbatch_and_repeat_ids(
    t: int | Int[Array, ""], shape: PipelineShape
) -> tuple[Int[Array, " S"], Int[Array, " S"]]:
    """Returns the microbatch and the repeat of every rank; 0 and 0 on ranks that have not begun."""
    indices = jnp.maximum(t - shape.forwarding_delay * jnp.arange(shape.num_ranks), 0)
    return indices % shape.num_microbatches, indices // shape.num_microbatches


def init_states(inputs: PyTree, keys: PyTree, shape: PipelineShape) -> LoopState:
    """Returns the buffers before iteration 0.

    Args:
        inputs: [M, ...] leaves.
        keys: [R, S, ...] dropout keys, or ().
        shape: The sizes of the pipeline.

    Returns:
        A dict. `state_io` [S, M / S, ...]: inputs not taken yet, then outputs. `shift` [S, ...]:
        results that the rank before has handed over. `prev_outputs` [S, ...]: results still to be
        handed over, None without delay. `circ_storage` [S, M, ...]: results of the last rank, until
        rank 0 reads them in its next repeat; `circ_storage_mover` [S, ...]: results to be stored
        there; both None if `need_circ_storage` is False. `loop_iteration`: 0. `keys` as given.
        Buffers are zeros, and are written before they are read.
    """

    def zeros(*dims):
        return jax.tree.map(lambda x: jnp.zeros((*dims, *x.shape[1:]), x.dtype), inputs)

    S, is_stored = shape.num_ranks, need_circ_storage(shape)
    return {
        "state_io": jax.tree.map(lambda x: x.reshape(S, -1, *x.shape[1:]), inputs),
        "shift": zeros(S),
        "prev_outputs": zeros(S) if shape.forwarding_delay > 1 else None,
        "circ_storage": zeros(S, shape.num_microbatches) if is_stored else None,
        "circ_storage_mover": zeros(S) if is_stored else None,
        "loop_iteration": jnp.int32(0),
        "keys": keys,
    }


def iteration_inputs(
    t: int | Int[Array, ""],
    state_io: PyTree,
    circ_storage: PyTree,
    shift: PyTree,
    shape: PipelineShape,
) -> PyTree:
    """Returns the stage inputs of all ranks at iteration `t`: [S, ...] leaves like `shift`.

    Rank 0 takes a new microbatch, or a result of the last rank. A rank in a bubble runs on a
    microbatch of its own part of `state_io`, and the result is dropped.
    """
    ranks = jnp.arange(shape.num_ranks)
    indices = t - shape.forwarding_delay * ranks
    from_stream = ~_busy(t, shape) | ((ranks == 0) & (indices < shape.num_microbatches))
    returned = shift if circ_storage is None else _slot(circ_storage, t % shape.num_microbatches)
    handed = _where(ranks == 0, returned, shift)
    return _where(from_stream, _slot(state_io, t % shape.microbatches_per_rank), handed)


def new_loop_state(
    output: PyTree, loop_state: LoopState, shape: PipelineShape, mesh: Mesh | None = None
) -> LoopState:
    """Returns the buffers after an iteration.

    Args:
        output: [S, ...] leaves, the stage outputs of all ranks.
        loop_state: The buffers before the iteration.
        shape: The sizes of the pipeline.
        mesh: The mesh. None runs all ranks on one device.

    Returns:
        The buffers after the iteration, with the shapes of `loop_state`.
    """
    t, delayed = loop_state["loop_iteration"], loop_state["prev_outputs"]
    storage, mover = loop_state["circ_storage"], loop_state["circ_storage_mover"]
    if storage is not None:
        slot = (t - 1 - iterations_of_one_repeat(shape)) % shape.num_microbatches
        storage, mover = _put(storage, rotate(mover, 1, mesh), slot), output
    return loop_state | {
        "state_io": _move_stream(loop_state["state_io"], output, t, shape, mesh),
        "shift": rotate(output if delayed is None else delayed, 1, mesh),
        "prev_outputs": None if delayed is None else output,
        "circ_storage": storage,
        "circ_storage_mover": mover,
        "loop_iteration": t + 1,
    }


def permute_output(output: PyTree, shape: PipelineShape) -> PyTree:
    """Rolls `state_io` [S, M / S, ...] after the last iteration to the inputs' order."""
    first = iterations_of_first_microbatch(shape) % shape.microbatches_per_rank
    return jax.tree.map(lambda x: jnp.roll(x, -first, axis=1), output)


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
    return on_ranks(take, mesh=mesh, in_dims=(stages_dim, 0), out_dims=out_dim)(weights, ids)


def run_stages(stage: Callable, mesh: Mesh | None = None) -> Callable:
    """Returns `(weights, x, batch_inputs, rng) -> y`, all [S, ...]: `stage` on all ranks."""
    stage = with_aux(stage)

    def rank(weights, x, batch_inputs, rng):
        return stage(weights, x, batch_inputs, rng)[0]

    return on_ranks(rank, mesh=mesh, in_dims=(0, 0, 0, 0), out_dims=0)


def run_one_iteration(
    stage: Callable,
    loop_state: LoopState,
    weights: PyTree,
    batch_inputs: PyTree,
    shape: PipelineShape,
    mesh: Mesh | None = None,
) -> LoopState:
    """Runs the stage of every rank on its microbatch, and hands over the results.

    Args:
        stage: `(weights of one stage, x, batch_inputs of one microbatch, rng) -> (y, aux)`.
        loop_state: The buffers before the iteration.
        weights: [S, ...] leaves, the weights that the ranks use in this iteration.
        batch_inputs: [M, ...] leaves.
        shape: The sizes of the pipeline.
        mesh: The mesh, or None.

    Returns:
        The buffers after the iteration, with the shapes of `loop_state`.
    """
    t = loop_state["loop_iteration"]
    microbatches, repeats = microbatch_and_repeat_ids(t, shape)
    state_io, storage = loop_state["state_io"], loop_state["circ_storage"]
    x = iteration_inputs(t, state_io, storage, loop_state["shift"], shape)
    keys = take_repeats(loop_state["keys"], repeats, mesh=mesh)
    rng = jax.vmap(fold_in_microbatch)(keys, microbatches)
    y = run_stages(stage, mesh)(weights, x, take_per_rank(batch_inputs, microbatches), rng)
    return new_loop_state(y, loop_state, shape, mesh)


def rotate(x: PyTree, by: int, mesh: Mesh | None = None) -> PyTree:
    """Rotates [S, ...] leaves by one rank, up (`by` = 1) or down (-1)."""

    def turn(x):
        ranks = lax.axis_size(AXIS)
        pairs = [(r, (r + by) % ranks) for r in range(ranks)]
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, AXIS, pairs), x)

    return on_ranks(turn, mesh=mesh, in_dims=(0,), out_dims=0)(x)


def _move_stream(
    state_io: PyTree, output: PyTree, t: Any, shape: PipelineShape, mesh: Any
) -> PyTree:
    """Moves a slot of every rank down by a rank; the last rank stores its output in its slot."""
    last = jnp.arange(shape.num_ranks) == shape.num_ranks - 1
    moved = rotate(_slot(state_io, t % shape.microbatches_per_rank), -1, mesh)
    return _put(
        state_io, _where(last & _busy(t, shape), output, moved), t % shape.microbatches_per_rank
    )


def _busy(t: Any, shape: PipelineShape) -> Bool[Array, " S"]:
    indices = t - shape.forwarding_delay * jnp.arange(shape.num_ranks)
    return (indices >= 0) & (indices < shape.num_repeats * shape.num_microbatches)


def _where(ranks: Bool[Array, " S"], x: PyTree, y: PyTree) -> PyTree:
    def choose(a, b):
        return jnp.where(ranks.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return jax.tree.map(choose, x, y)


def _slot(buffer: PyTree, index: Any) -> PyTree:
    return jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False), buffer
    )


def _put(buffer: PyTree, x: PyTree, index: Any) -> PyTree:
    return jax.tree.map(
        lambda b, new: lax.dynamic_update_index_in_dim(b, new, index, axis=1), buffer, x
    )
