"""An engine that runs any schedule in one XLA program, on whole arrays.

S ranks, v chunks on each, M microbatches.
"""

from functools import partial
from typing import Any

from jax.sharding import Mesh
from jaxtyping import PyTree, Scalar

from ...autodiff import Remat, StagedModel, recompute
from ...autodiff.staged_model import Aux
from ...schedules import num_ranks
from ...schedules.language import num_slices
from ...schedules.lock_step import Ticks, TickTables, check_ticks, rank_and_chunk_by_stage
from ...schedules.lock_step import tick_tables as tables_of
from .._boundary import check_vocab_parallel
from .._options import NO_OPTIONS, EngineOptions
from .._whole_arrays import (
    check_rows,
    common_dims,
    gradient_dims,
    on_parts,
    value_dims,
    with_arrays,
)
from ..ranks import AXIS
from ..weight_gather import EACH_TICK, Gather
from ._loop import ScheduledOptions, rank_value, rank_value_and_grad


def scheduled_value_and_grad(
    model: StagedModel,
    weights: dict[str, Any],
    batch_inputs: PyTree,
    keys: PyTree = (),
    *,
    ticks: Ticks,
    mesh: Mesh | None = None,
    remat: Remat = recompute,
    gather: Gather = EACH_TICK,
    boundary_gather: Gather = EACH_TICK,
    options: EngineOptions = NO_OPTIONS,
) -> tuple[tuple[Scalar, Aux], dict[str, Any]]:
    """Returns loss, metrics and gradients of a batch that runs by any schedule.

    Args:
        weights: The groups "embed", "stages" and "head"; leaves of "stages" are [v, S, ...], a
            rank's stages in forward order, as `spmd.to_ranks` returns them. A stage that several
            ranks run is stored on one of them, which sends its weights to the others once.
        batch_inputs: [M, ...] leaves; for a schedule with s slices [M * s, ...], the slices of a
            microbatch in order.
        keys: [v, S, ...] leaves, or () without dropout. The index along dim 0 of `batch_inputs` is
            folded into random keys.
        mesh: A mesh with an axis `stage` of size S. None runs all ranks on one device.
        gather: When the stages' weights that are sharded over other axes are gathered: in every
            `tick`, `once`, or per `repeat`: whenever a rank changes to another of its stages, and
            one such change ahead.
        boundary_gather: How the weights `{"embed": ..., "head": ...}` are gathered. They are
            gathered once, whatever its `when`.
        options: Options of the engine. It reads `vocab_parallel`: `gather` and `boundary_gather`
            say how gradients are stored and summed, and the others are the circular engine's.

    Returns:
        ((loss, metrics), gradients). The loss is a scalar; gradients are like `weights`.

    Raises:
        ValueError: If counts do not agree with each other, the schedule or the mesh; if rows do not
            divide over `gather.batch_axes`; if `gather.when` is "repeat" and backwards are split;
            if ranks run or store different numbers of stages.
        ScheduleError: If `ticks` cannot be run.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxpipe.schedules import build
        >>> from jaxpipe.schedules.lock_step import to_lock_step
        >>> model = StagedModel(
        ...     embed=lambda w, batch: batch["x"] * w,
        ...     stage=lambda w, x, batch, rng: x + w,
        ...     loss=lambda boundary, y, batch: (jnp.sum(y * boundary["head"]), {}),
        ... )
        >>> weights = {"embed": jnp.ones(()), "stages": jnp.ones((1, 2)), "head": jnp.ones(())}
        >>> ticks = to_lock_step(build("1f1b", ranks=2, microbatches=3))
        >>> run = lambda w, x: scheduled_value_and_grad(model, w, {"x": x}, ticks=ticks)
        >>> _, grads = jax.eval_shape(run, weights, jnp.ones((3, 4)))  # 3 microbatches
        >>> grads["stages"].shape  # as the weights: [chunks, ranks]
        (1, 2)
    """
    _check_model(model, ticks, options)
    tables = _checked_tables(weights, batch_inputs, keys, ticks, mesh, gather)
    if not tables.num_slots["cotangents"]:
        raise ValueError(
            "`ticks` has no backwards, and gradients are wanted. Give `to_lock_step(schedule)`, or "
            "call `scheduled_value`."
        )
    num_stages = ticks.schedule.num_stages
    rank_options = ScheduledOptions(
        tables=tables,
        num_stages=num_stages,
        remat=remat,
        gather=gather,
        boundary_gather=boundary_gather,
        engine=options,
    )
    rank_fn = partial(rank_value_and_grad, options=rank_options)
    out_dims = value_dims(gather), gradient_dims(gather, boundary_gather)
    run = on_parts(rank_fn, model, mesh, gather, boundary_gather, out_dims)
    value, (stage_grads, boundary_grads) = run(weights, batch_inputs, keys)
    return with_arrays(value, batch_inputs), boundary_grads | {"stages": stage_grads}


def scheduled_value(
    model: StagedModel,
    weights: dict[str, Any],
    batch_inputs: PyTree,
    keys: PyTree = (),
    *,
    ticks: Ticks,
    mesh: Mesh | None = None,
    gather: Gather = EACH_TICK,
    boundary_gather: Gather = EACH_TICK,
    options: EngineOptions = NO_OPTIONS,
) -> tuple[Scalar, Aux]:
    """Returns loss and metrics of a batch, without gradients.

    Takes the arguments of `scheduled_value_and_grad`; `ticks` are the forwards alone,
    `to_lock_step(forward_only(schedule))`.
    """
    _check_model(model, ticks, options)
    tables = _checked_tables(weights, batch_inputs, keys, ticks, mesh, gather)
    if tables.num_slots["cotangents"]:
        raise ValueError(
            "`ticks` has backwards, which a value alone does not need. Give "
            "`to_lock_step(forward_only(schedule))`."
        )
    num_stages = ticks.schedule.num_stages
    rank_options = ScheduledOptions(
        tables=tables,
        num_stages=num_stages,
        remat=recompute,
        gather=gather,
        boundary_gather=boundary_gather,
        engine=options,
    )
    rank_fn = partial(rank_value, options=rank_options)
    run = on_parts(rank_fn, model, mesh, gather, boundary_gather, value_dims(gather))
    return with_arrays(run(weights, batch_inputs, keys), batch_inputs)


def _checked_tables(
    weights: dict[str, Any],
    batch_inputs: PyTree,
    keys: PyTree,
    ticks: Ticks,
    mesh: Mesh | None,
    gather: Gather,
) -> TickTables:
    """Checks the arguments against each other, and returns the tables of `ticks`."""
    tables = tables_of(check_ticks(ticks))
    _check(weights["stages"], keys, batch_inputs, ticks, mesh)
    check_rows({"batch_inputs": batch_inputs}, gather.batch_axes, mesh)
    if gather.when == "repeat" and tables.num_slots["wgrad_residuals"]:
        raise ValueError(
            "`gather` is 'repeat', and the schedule has W apart from I. Weights are gathered ahead "
            "for F and B alone. Give 'once' or 'tick', or a schedule of whole backwards."
        )
    return tables


def _check_model(model: StagedModel, ticks: Ticks, options: EngineOptions) -> None:
    if num_slices(ticks.schedule) > 1 and model.sliced_stage is None:
        raise ValueError(
            "`ticks` is a schedule with slices of sequences and `model.sliced_stage` is None: the "
            "layers do not say what they carry from slice to slice. Give one, or a schedule of "
            "whole microbatches, such as 1f1b."
        )
    check_vocab_parallel(model, options.vocab_parallel)
    unread = sorted(options.changed.keys() - {"vocab_parallel", "zero1", "reduce_dtype"})
    if unread:
        raise ValueError(
            f"`options` sets `{'` and `'.join(unread)}`, which the scheduled engine does not read. "
            "Leave the default."
        )


def _check(
    stages: PyTree, keys: PyTree, batch_inputs: PyTree, ticks: Ticks, mesh: Mesh | None
) -> None:
    """Checks that ranks, chunks and microbatches are those of the schedule."""
    schedule = ticks.schedule
    assigned = rank_and_chunk_by_stage(schedule).values()
    expected = 1 + max(chunk for _, chunk in assigned), num_ranks(schedule)
    dims = common_dims({"weights['stages']": stages, "keys": keys}, 2, "[chunks, ranks, ...]")
    if dims != expected:
        raise ValueError(
            f"Leaves of `weights['stages']` begin with {dims}, chunks x ranks, and `ticks` is a "
            f"schedule of {expected}. They must be equal: `spmd.to_ranks` reorders stacked stages."
        )
    (microbatches,) = common_dims({"batch_inputs": batch_inputs}, 1, "[microbatches, ...]")
    slices = num_slices(schedule)
    if microbatches != schedule.num_microbatches * slices:
        of_slices = "" if slices == 1 else f" x {slices} slices"
        raise ValueError(
            f"`batch_inputs` has {microbatches} microbatches, and `ticks` is a schedule of "
            f"{schedule.num_microbatches}{of_slices}. They must be equal."
        )
    if mesh is not None and mesh.shape.get(AXIS) != expected[1]:
        raise ValueError(
            f"`ticks` is a schedule of {expected[1]} ranks, but the axis {AXIS!r} of `mesh` "
            f"{dict(mesh.shape)} has {mesh.shape.get(AXIS)}. They must be equal."
        )
