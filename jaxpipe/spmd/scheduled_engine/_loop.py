"""Any schedule, forward and backward, in one loop over ticks, seen by one rank.

A tick is F, then B or I, then W, each under a condition, so a rank that has none of it to do does
nothing; then activations are handed to the ranks of the next stages and cotangents to those of the
stages before. What happens when, and where everything lies meanwhile, is in tables that
`jaxpipe.schedules` makes from the schedule. So the program has one F and one B, whatever the
schedule, and buffers are as large as its peak.

S ranks, v chunks on each, M microbatches.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree, Scalar

from ...autodiff import Model, Remat, Sums, combine_losses, floating, index_leading, split_backward
from ...schedules import TickTables
from ...schedules.lock_step import PhaseTable
from .._ranks import AXIS, either, how_often, vary, zeros
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
    """What the caller chooses.

    Attributes:
        tables: The schedule.
        num_stages: Of the model.
        remat: Wraps a stage: what an F keeps for B, I and W.
        gather: When the stages' weights are gathered.
        ends_gather: How those of embedding and head are.
        share_head: Whether all ranks compute the loss together.
    """

    tables: TickTables
    num_stages: int
    remat: Remat
    gather: Gather
    ends_gather: Gather
    share_head: bool


def rank_value_and_grad(
    model: Model,
    how: How,
    stages: PyTree,
    ends: dict[str, PyTree],
    side: PyTree,
    keys: PyTree,
) -> tuple[tuple[Scalar, Sums], tuple[PyTree, dict[str, PyTree]]]:
    """Runs on one rank inside the axis `stage`, and on its own rows over the batch axes.

    Args:
        model: The model.
        how: The choices.
        stages: [v, ...] leaves.
        ends: Weights of the embedding and of the head.
        side: [M, ...] leaves.
        keys: [v, ...] leaves, or ().

    Returns:
        ((loss, metrics) of the batch, (gradients of `stages`, gradients of `ends`)).
    """
    run, nothing, waiting, totals = _prepare(model, how, stages, ends, side, keys)
    totals = _all_ticks(how, run, nothing, waiting, totals)
    of_ends = how.ends_gather.scatter(lax.psum(totals.ends, AXIS))
    of_stages = run.weights.close(totals.stages)
    return _summed(how, totals), (like(of_stages, stages), like(of_ends, ends))


def rank_value(
    model: Model, how: How, stages: PyTree, ends: dict[str, PyTree], side: PyTree, keys: PyTree
) -> tuple[Scalar, Sums]:
    """(loss, metrics) alone, of a schedule that has forwards alone."""
    return _summed(how, _all_ticks(how, *_prepare(model, how, stages, ends, side, keys)))


def _all_ticks(how: How, run: Run, nothing: Left, waiting: Waiting, totals: Totals) -> Totals:
    def tick(carry, row):
        return _tick(run, how.tables, nothing, carry, *row), None

    rows = _rows(how.tables), jnp.asarray(_losses(how)) if how.share_head else None
    return lax.scan(tick, (waiting, totals), rows)[0][1]


def _losses(how: How) -> list[int]:
    """[num_ticks] the microbatch that leaves the last stage, or -1."""
    forward = how.tables.forward
    rows = zip(forward.microbatch, forward.stage, strict=True)
    last = how.num_stages - 1
    return [max(m if s == last else -1 for m, s in zip(*row, strict=True)) for row in rows]


def _summed(how: How, totals: Totals) -> tuple[Scalar, Sums]:
    """The batch's loss and metrics."""
    sums = totals.loss, totals.of_loss, totals.of_stages
    return combine_losses(*lax.psum(sums, (AXIS, *how.gather.batch_axes)))


def _rows(tables: TickTables) -> Row:
    """This rank's columns: [ticks] each. They vary over `stage` alone, as what they index may."""

    def column(table: tuple) -> Int[Array, " ticks"]:
        return jnp.take(jnp.asarray(table, jnp.int32), lax.axis_index(AXIS), axis=1)

    of_ticks = tables._replace(num_slots={}, first_chunks=None, separate_backward_weights=None)  # type: ignore[arg-type]
    return jax.tree.map(column, of_ticks, is_leaf=lambda x: type(x) is tuple)


def _prepare(
    model: Model, how: How, stages: PyTree, ends: dict[str, PyTree], side: PyTree, keys: PyTree
) -> tuple[Run, Left, Waiting, Totals]:
    """The stage traced and divided, what an F leaves, empty, and everything at its start."""
    weights = chunks_of(how.gather, stages, how.tables)
    keep = how.tables.num_slots["cotangents"] > 0
    held = weights.start(keep)
    whole = how.ends_gather.whole(how.ends_gather.cast(ends))
    # Nobody computes with this visit: it is there for its types.
    x = jax.tree.map(vary, model.embed(whole["embed"], index_leading(side, 0)))
    visit = weights.read(held, _FIRST, True), x, index_leading(side, 0), index_leading(keys, 0)
    divided = split_backward(how.remat(model.stage), *visit) if keep else None
    _, sums = jax.eval_shape(model.stage, *visit)
    _, of_loss = jax.eval_shape(model.loss, model.ends(whole), x, index_leading(side, 0))
    no_sums = {name: zeros(s) for name, s in sums.items()}
    dsums = {name: jnp.full_like(s, name == "loss") for name, s in no_sums.items()}
    last_alone = how.num_stages if how.share_head else how.num_stages - 1
    run = Run(model, how.num_stages, last_alone, divided, weights, whole, side, keys, dsums)
    totals = Totals(
        zeros(jax.ShapeDtypeStruct((), jnp.float32)),
        jax.tree.map(zeros, of_loss),
        no_sums,
        held,
        jax.tree.map(zeros, wide(floating(whole))) if keep else {},
    )
    waiting = _waiting(run, how.tables.num_slots, visit)
    kept = index_leading((waiting.for_backward, waiting.for_weight), 0)
    nothing = Left(jax.tree.map(zeros, x), jax.tree.map(zeros, floating(x)) if keep else (), *kept)
    return run, nothing, waiting, totals


def _waiting(run: Run, num_slots: dict[str, int], visit: tuple) -> Waiting:
    """Empty buffers."""
    w, x, side, keys = visit

    def room(tree: PyTree, name: str) -> PyTree:
        slots = max(1, num_slots[name])
        return jax.tree.map(lambda a: buffer(_type(a), slots + _on_host(a)), tree)

    stage = run.stage
    if stage is None:
        return Waiting(room(x, "inputs"), (), [], [], [])

    def residuals(x):
        return stage.forward(w, x, side, keys)[1]

    def links(x):
        out, kept = stage.forward(w, x, side, keys)
        return stage.input(w, side, keys, kept, floating(out))[2]

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
    """Of an array, or of an abstract value, which is one."""
    return jax.typeof(x) if isinstance(x, jax.Array) else x


def _tick(
    run: Run, tables: TickTables, nothing: Left, carry: tuple, row: Row, leaves: Index | None
) -> tuple:
    """One tick. `nothing` is like what an F leaves; `leaves` is the microbatch whose loss all ranks
    compute together.

    The buffers stay outside of conditions, and are written in place: going through one they would
    be copied. Totals go through, of which JAX forwards what a branch does not change.
    """
    waiting, totals = carry
    totals = totals._replace(stages=run.weights.enter(totals.stages, row.forward, True))
    totals, left = either(
        row.forward.microbatch >= 0,
        lambda totals: forward(run, row.forward, waiting, totals, nothing),
        lambda totals: (totals, nothing),
        totals,
        like=(totals, nothing),
        often=how_often(tables.forward.microbatch),
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
        totals = either(
            row.weight.microbatch >= 0,
            lambda totals: weight(run, row.weight, waiting, totals),
            lambda totals: totals,
            totals,
            like=totals,
            often=how_often(tables.weight.microbatch),
        )
    return waiting, totals


def _shared_loss(
    run: Run, nothing: Left, work: Work, y: PyTree, microbatch: Index, totals: Totals
) -> tuple[Totals, PyTree]:
    """All ranks have what the last stage returned, and compute its loss together.

    The condition is the same on all of them, so they may communicate under it.
    """
    is_last = (work.microbatch >= 0) & (work.stage == run.num_stages - 1)

    def loss(totals: Totals) -> tuple[Totals, PyTree]:
        shared = jax.tree.map(lambda y: _from_one(is_last, y), y)
        return shared_loss(run, shared, index_leading(run.side, microbatch), totals)

    return either(
        microbatch >= 0,
        loss,
        lambda totals: (totals, nothing.cotangent),
        totals,
        like=(totals, nothing.cotangent),
    )


def _from_one(has_it: Bool[Array, ""], x: jax.Array) -> jax.Array:
    """What one rank has, on all. A sum with zeros is exact; bfloat16 XLA:CPU cannot sum."""
    dtype = jnp.float32 if x.dtype == jnp.bfloat16 else x.dtype
    return lax.psum(jnp.where(has_it, x, jnp.zeros_like(x)).astype(dtype), AXIS).astype(x.dtype)


def _tick_backward(
    run: Run, tables: TickTables, nothing: Left, waiting: Waiting, totals: Totals, row: Row
) -> tuple[Waiting, Totals]:
    work = row.backward
    no_link = index_leading(waiting.links, 0)
    totals = totals._replace(stages=run.weights.enter(totals.stages, work, False))
    totals, (dx, link) = either(
        work.microbatch >= 0,
        lambda totals: backward(tables)(run, work, waiting, totals, no_link),
        lambda totals: (totals, (nothing.cotangent, no_link)),
        totals,
        like=(totals, (nothing.cotangent, no_link)),
        often=how_often(tables.backward.microbatch),
    )
    totals = totals._replace(stages=run.weights.leave(totals.stages, work))
    return waiting._replace(
        cotangents=_hand_over(waiting.cotangents, dx, row.cotangent_arrivals),
        links=_store(waiting.links, link, work.wgrad_residuals_slot),
    ), totals


def _hand_over(waiting: PyTree, x: PyTree, arrivals: dict[int, Index]) -> PyTree:
    """Hands `x` on by every number of ranks, and stores what arrives where a slot waits for it."""
    ranks = lax.axis_size(AXIS)
    for offset, slot in arrivals.items():
        pairs = [(r, (r + offset) % ranks) for r in range(ranks)]
        waiting = _store(waiting, lax.ppermute(x, AXIS, pairs) if offset else x, slot)
    return waiting


def _store(buffers: PyTree, new: PyTree, slot: Index) -> PyTree:
    """Writes a slot of every buffer, if there is one to be written."""

    def store(buffer: jax.Array, new: jax.Array) -> jax.Array:
        if _on_host(buffer):  # which computes nothing: its last slot takes what nobody wants
            return put(buffer, new, jnp.where(slot >= 0, slot, buffer.shape[0] - 1))
        return put(buffer, jnp.where(slot >= 0, new, index_leading(buffer, slot)), slot)

    return jax.tree.map(store, buffers, new)


def _on_host(x: Any) -> bool:
    return _type(x).memory_space == jax.memory.Space.Host
