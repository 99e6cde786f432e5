"""The loop over ticks that runs any schedule, forward and backward, seen by one rank.

A tick is F, then B or I, then W, each under a condition, so that a rank skips a phase in which it
has no work; then activations are sent to the ranks of the next stages and cotangents to those of
the stages before. Tables that `jaxpipe.schedules` makes from the schedule say what a rank runs in a
tick and in which slot of a buffer every array is stored. So the program has one F and one B,
whatever the schedule, and buffers are as large as its peak.

S ranks, v chunks on each, M microbatches.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree, Scalar

from ...autodiff import Model, Remat
from ...autodiff._model import Aux, combine_losses, index_leading
from ...autodiff._pullback import floating
from ...autodiff._split_backward import split_backward
from ...schedules.lock_step import PhaseTable, TickTables
from .._ranks import AXIS
from .._varying import cond, execution_count_hint, pvary, zeros
from .._weight_gather import Gather, wide
from ..circular_engine._loss import like
from ..circular_engine._residuals import buffer
from ..circular_engine._shape import put
from ._phases import Left, Run, Totals, Waiting, backward, divide, forward, shared_loss, weight
from ._weights import Work, chunks_of

Index = Int[Array, ""]
Row = Any
"""`TickTables` with the integers of one tick and rank."""
_FIRST = PhaseTable(*[0] * len(PhaseTable._fields))  # type: ignore[arg-type]


class How(NamedTuple):
    """Options of the scheduled engine.

    Attributes:
        tables: The schedule.
        num_stages: Number of stages of the model.
        remat: Wraps a stage, and so decides which residuals F stores for B, I and W.
        gather: When and how the stages' weights are gathered.
        boundary_gather: How the weights of embedding and head are gathered.
        share_head: Whether all ranks compute the loss together.
    """

    tables: TickTables
    num_stages: int
    remat: Remat
    gather: Gather
    boundary_gather: Gather
    share_head: bool


def rank_value_and_grad(
    model: Model,
    how: How,
    stages: PyTree,
    boundary: dict[str, PyTree],
    batch_inputs: PyTree,
    keys: PyTree,
) -> tuple[tuple[Scalar, Aux], tuple[PyTree, dict[str, PyTree]]]:
    """Returns loss, metrics and gradients, as computed by one rank inside the axis `stage`.

    Over the batch axes, if there are any, each device runs on its own rows.

    Args:
        model: The model.
        how: The options.
        stages: [v, ...] leaves.
        boundary: Weights of the embedding and of the head.
        batch_inputs: [M, ...] leaves.
        keys: [v, ...] leaves, or ().

    Returns:
        ((loss, metrics) of the batch, (gradients of `stages`, gradients of `boundary`)).
    """
    run, nothing, waiting, totals = _prepare(model, how, stages, boundary, batch_inputs, keys)
    totals = _all_ticks(how, run, nothing, waiting, totals)
    boundary_grads = how.boundary_gather.scatter(lax.psum(totals.boundary, AXIS))
    stage_grads = run.weights.close(totals.stages)
    return _summed(how, totals), (like(stage_grads, stages), like(boundary_grads, boundary))


def rank_value(
    model: Model,
    how: How,
    stages: PyTree,
    boundary: dict[str, PyTree],
    batch_inputs: PyTree,
    keys: PyTree,
) -> tuple[Scalar, Aux]:
    """Returns (loss, metrics) of the batch, by a schedule that has only forwards."""
    return _summed(
        how, _all_ticks(how, *_prepare(model, how, stages, boundary, batch_inputs, keys))
    )


def _all_ticks(how: How, run: Run, nothing: Left, waiting: Waiting, totals: Totals) -> Totals:
    def tick(carry, row):
        return _tick(run, how.tables, nothing, carry, *row), None

    rows = _rows(how.tables), jnp.asarray(_losses(how)) if how.share_head else None
    return lax.scan(tick, (waiting, totals), rows)[0][1]


def _losses(how: How) -> list[int]:
    """Returns [num_ticks]: the microbatch that leaves the last stage in a tick, or -1."""
    forward = how.tables.forward
    rows = zip(forward.microbatch, forward.stage, strict=True)
    last = how.num_stages - 1
    return [max(m if s == last else -1 for m, s in zip(*row, strict=True)) for row in rows]


def _summed(how: How, totals: Totals) -> tuple[Scalar, Aux]:
    """Aux losses and metrics over all devices, and returns those of the batch."""
    local = totals.loss, totals.loss_metrics, totals.stage_aux
    return combine_losses(*lax.psum(local, (AXIS, *how.gather.batch_axes)))


def _rows(tables: TickTables) -> Row:
    """Returns this rank's columns of the tables, [ticks] each, which vary over `stage` alone."""

    def column(table: tuple) -> Int[Array, " ticks"]:
        return jnp.take(jnp.asarray(table, jnp.int32), lax.axis_index(AXIS), axis=1)

    columns = tables._replace(num_slots={}, first_chunks=None, separate_backward_weights=None)  # type: ignore[arg-type]
    return jax.tree.map(column, columns, is_leaf=lambda x: type(x) is tuple)


def _prepare(
    model: Model,
    how: How,
    stages: PyTree,
    boundary: dict[str, PyTree],
    batch_inputs: PyTree,
    keys: PyTree,
) -> tuple[Run, Left, Waiting, Totals]:
    """Traces and splits the stage; returns (invariants, zero outputs of an F, buffers, totals)."""
    weights = chunks_of(how.gather, stages, how.tables)
    keep = how.tables.num_slots["cotangents"] > 0
    held = weights.start(keep)
    whole = how.boundary_gather.whole(how.boundary_gather.cast(boundary))
    # Only the types of these arguments are used, to trace the stage.
    first_inputs = index_leading(batch_inputs, 0)
    x = jax.tree.map(pvary, model.embed(whole["embed"], first_inputs))
    visit = weights.read(held, _FIRST, True), x, first_inputs, index_leading(keys, 0)
    divided = split_backward(how.remat(model.stage), *visit) if keep else None
    _, aux_shapes = jax.eval_shape(model.stage, *visit)
    _, loss_metrics = jax.eval_shape(model.loss, model.boundary(whole), x, first_inputs)
    zero_aux = {name: zeros(s) for name, s in aux_shapes.items()}
    daux = {name: jnp.full_like(s, name == "loss") for name, s in zero_aux.items()}
    last_alone = how.num_stages if how.share_head else how.num_stages - 1
    run = Run(model, how.num_stages, last_alone, divided, weights, whole, batch_inputs, keys, daux)
    totals = Totals(
        zeros(jax.ShapeDtypeStruct((), jnp.float32)),
        jax.tree.map(zeros, loss_metrics),
        zero_aux,
        held,
        jax.tree.map(zeros, wide(floating(whole))) if keep else {},
    )
    waiting = _waiting(run, how.tables.num_slots, visit)
    kept = index_leading((waiting.for_backward, waiting.for_weight), 0)
    nothing = Left(jax.tree.map(zeros, x), jax.tree.map(zeros, floating(x)) if keep else (), *kept)
    return run, nothing, waiting, totals


def _waiting(run: Run, num_slots: dict[str, int], visit: tuple) -> Waiting:
    """Allocates the buffers."""
    w, x, batch_inputs, keys = visit

    def room(tree: PyTree, name: str) -> PyTree:
        slots = max(1, num_slots[name])
        return jax.tree.map(lambda a: buffer(_type(a), slots + _on_host(a)), tree)

    stage = run.stage
    if stage is None:
        return Waiting(room(x, "inputs"), (), [], [], [])

    def residuals(x):
        return stage.forward(w, x, batch_inputs, keys)[1]

    def links(x):
        out, kept = stage.forward(w, x, batch_inputs, keys)
        return stage.input(w, batch_inputs, keys, kept, floating(out))[2]

    for_backward, for_weight = divide(stage, jax.make_jaxpr(residuals)(x).out_avals)
    return Waiting(
        room(x, "inputs"),
        room(floating(x), "cotangents"),
        room(for_backward, "residuals_for_backward"),
        room(for_weight, "residuals_for_weight"),
        room(jax.make_jaxpr(links)(x).out_avals, "wgrad_residuals")
        if num_slots["wgrad_residuals"]
        else [],
    )


def _type(x: Any) -> Any:
    """Returns the type of an array; an abstract value is returned as it is."""
    return jax.typeof(x) if isinstance(x, jax.Array) else x


def _tick(
    run: Run, tables: TickTables, nothing: Left, carry: tuple, row: Row, leaves: Index | None
) -> tuple:
    """Runs one tick.

    `nothing` is zeros like the results of an F; `leaves` is the microbatch whose loss all ranks
    compute together, or None. Buffers are not operands of conditionals, which would copy them, and
    are written in place. Totals are: JAX forwards those that a branch does not change.
    """
    waiting, totals = carry
    totals = totals._replace(stages=run.weights.enter(totals.stages, row.forward, True))
    totals, left = cond(
        row.forward.microbatch >= 0,
        lambda totals: forward(run, row.forward, waiting, totals, nothing),
        lambda totals: (totals, nothing),
        totals,
        like=(totals, nothing),
        hint=execution_count_hint(tables.forward.microbatch),
    )
    if leaves is not None:
        totals, cotangent = _shared_loss(run, nothing, row.forward, left.activation, leaves, totals)
        left = left._replace(cotangent=cotangent)
    waiting = waiting._replace(
        inputs=_hand_over(waiting.inputs, left.activation, row.activation_arrivals)
    )
    if run.stage is None:
        return waiting, totals
    waiting = waiting._replace(
        cotangents=_store(waiting.cotangents, left.cotangent, row.forward.cotangent_slot),
        for_backward=_store(
            waiting.for_backward, left.for_backward, row.forward.residuals_for_backward_slot
        ),
        for_weight=_store(
            waiting.for_weight, left.for_weight, row.forward.residuals_for_weight_slot
        ),
    )
    waiting, totals = _tick_backward(run, tables, nothing, waiting, totals, row)
    if tables.num_slots["wgrad_residuals"]:
        totals = cond(
            row.weight.microbatch >= 0,
            lambda totals: weight(run, row.weight, waiting, totals),
            lambda totals: totals,
            totals,
            like=totals,
            hint=execution_count_hint(tables.weight.microbatch),
        )
    return waiting, totals


def _shared_loss(
    run: Run, nothing: Left, work: Work, y: PyTree, microbatch: Index, totals: Totals
) -> tuple[Totals, PyTree]:
    """Broadcasts the output of the last stage to all ranks, which compute its loss together.

    The condition is the same on all ranks, so they may communicate under it.
    """
    is_last = (work.microbatch >= 0) & (work.stage == run.num_stages - 1)

    def loss(totals: Totals) -> tuple[Totals, PyTree]:
        shared = jax.tree.map(lambda y: _from_one(is_last, y), y)
        return shared_loss(run, shared, index_leading(run.batch_inputs, microbatch), totals)

    return cond(
        microbatch >= 0,
        loss,
        lambda totals: (totals, nothing.cotangent),
        totals,
        like=(totals, nothing.cotangent),
    )


def _from_one(has_it: Bool[Array, ""], x: jax.Array) -> jax.Array:
    """Broadcasts `x` from one rank to all, by an exact sum with zeros (float32 for bfloat16)."""
    dtype = jnp.float32 if x.dtype == jnp.bfloat16 else x.dtype
    return lax.psum(jnp.where(has_it, x, jnp.zeros_like(x)).astype(dtype), AXIS).astype(x.dtype)


def _tick_backward(
    run: Run, tables: TickTables, nothing: Left, waiting: Waiting, totals: Totals, row: Row
) -> tuple[Waiting, Totals]:
    work = row.backward
    no_link = index_leading(waiting.links, 0)
    totals = totals._replace(stages=run.weights.enter(totals.stages, work, False))
    totals, (dx, link) = cond(
        work.microbatch >= 0,
        lambda totals: backward(tables)(run, work, waiting, totals, no_link),
        lambda totals: (totals, (nothing.cotangent, no_link)),
        totals,
        like=(totals, (nothing.cotangent, no_link)),
        hint=execution_count_hint(tables.backward.microbatch),
    )
    totals = totals._replace(stages=run.weights.leave(totals.stages, work))
    return waiting._replace(
        cotangents=_hand_over(waiting.cotangents, dx, row.cotangent_arrivals),
        links=_store(waiting.links, link, work.wgrad_residuals_slot),
    ), totals


def _hand_over(waiting: PyTree, x: PyTree, arrivals: dict[int, Index]) -> PyTree:
    """Sends `x` by every offset of ranks in `arrivals`, and stores what is received in its slot."""
    ranks = lax.axis_size(AXIS)
    for offset, slot in arrivals.items():
        pairs = [(r, (r + offset) % ranks) for r in range(ranks)]
        waiting = _store(waiting, lax.ppermute(x, AXIS, pairs) if offset else x, slot)
    return waiting


def _store(buffers: PyTree, new: PyTree, slot: Index) -> PyTree:
    """Writes `new` to a slot of every buffer, unless `slot` is negative."""

    def store(buffer: jax.Array, new: jax.Array) -> jax.Array:
        if _on_host(buffer):  # no `where` in host memory: the last slot is never read
            return put(buffer, new, jnp.where(slot >= 0, slot, buffer.shape[0] - 1))
        return put(buffer, jnp.where(slot >= 0, new, index_leading(buffer, slot)), slot)

    return jax.tree.map(store, buffers, new)


def _on_host(x: Any) -> bool:
    return _type(x).memory_space == jax.memory.Space.Host
