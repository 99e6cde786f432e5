"""Estimates the memory of a run from shapes, without compiling anything, as its engine says it."""

import math

import jax
import jax.numpy as jnp

from ...engines import PeakMemory, Sharded, StepSizes, most_bytes_for_several_of
from ...planner import StepLayout
from ...planner.memory import step_counts, step_sizes
from ...schedules import language
from ...sharding import AXES
from ..plan._setup import StepPlan
from ..step._state import of_gradients, state_shapes
from ..step._step import stored_shardings
from ._planned_model import planned_model


def estimate_memory(plan: StepPlan) -> tuple[PeakMemory, ...]:
    """Estimates the memory of a device at the peak of a step; for `mpmd` that of every rank.

    It is what `jaxpipe plan` says of the same layout, with the weights and the optimizer's state by
    their shardings.
    """
    engine, layout = plan.engine, _step_layout(plan)
    sizes, counts = _sizes(plan, layout), step_counts(layout)
    ranks = zip(
        engine.buffers(plan.pipeline),
        engine.step_bytes(plan.pipeline, plan.groups, plan.state.weights.tied),
        _optimizer_bytes(plan),
        _all_grads(plan, sizes),
        strict=True,
    )
    estimates = [
        engine.memory(
            counts, buffers, sizes._replace(weights=weights, optimizer=optimizer, **grads)
        )
        for buffers, weights, optimizer, grads in ranks
    ]
    return tuple(estimates if engine.program_per_rank else estimates[:1])


def _step_layout(plan: StepPlan) -> StepLayout:
    """Returns the layout of a run as planners write it."""
    pipeline, batch, model, remat = plan.pipeline, plan.batch, plan.model, plan.model.remat
    return StepLayout(
        mesh=tuple(plan.pipe.mesh.shape[axis] for axis in AXES),
        across="",
        engine_name=plan.engine.config_name,
        schedule="",
        chunks=pipeline.layout.num_repeats,
        counts=tuple(map(len, pipeline.layout.stage_layer_ids)),
        microbatches=batch.num_microbatches,
        accumulation=batch.gradient_accumulation_steps,
        policy=remat.policy if remat.on_ticks or remat.on_layers else "none",
        scope="layer" if not remat.on_ticks else "both" if remat.on_layers else "tick",
        gather=pipeline.gather,
        vocab_tiling=model.num_vocab_tiling,
        options=pipeline.options,
        copies=0 if pipeline.schedule is None else language.num_copies(pipeline.schedule),
        most_for_several=most_bytes_for_several_of(pipeline),
    )


def _sizes(plan: StepPlan, layout: StepLayout) -> StepSizes:
    weights, batch, shards = plan.state.weights, plan.batch, layout.num_shards
    model = planned_model(
        "",
        weights.sizes,
        weights.layout.num_layers,
        weights.abstract_unstacked,
        plan.model,
        plan.state.optimizer,
        weight_dtype=weights.dtype,
        rules=weights.devices.rules,
    )
    tokens = batch.microbatch_size * batch.length / shards / layout.sizes["context"]
    return step_sizes(model, layout, tokens)


def _all_grads(plan: StepPlan, sizes: StepSizes) -> list[dict[str, Sharded | float]]:
    """Returns the gradients of every rank; of programs of ranks by their shardings."""
    engine, tied = plan.engine, plan.state.weights.tied
    if not engine.program_per_rank:
        return [{}] * plan.pipe.mesh.shape["stage"]
    groups = plan.groups
    in_float32 = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), groups)
    sums, of_a_call = (
        engine.step_bytes(of_gradients(plan), tree, tied) for tree in (in_float32, groups)
    )
    nothing = Sharded(0.0, 0.0)
    return [
        {"grads": Sharded(size, size), "boundary_grads": nothing, "call_grads": one}
        for size, one in zip(sums, of_a_call, strict=True)
    ]


def _optimizer_bytes(plan: StepPlan) -> list[int]:
    """Returns the bytes of the optimizer's state on a device of every rank."""
    shapes, shardings = state_shapes(plan.state)["optimizer"], stored_shardings(plan)["optimizer"]
    sizes = [0] * plan.pipe.mesh.shape["stage"]
    for leaf, where in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True):
        for rank in getattr(where, "mpmd_idxs", range(len(sizes))):
            here = where.of_rank(rank) if plan.engine.program_per_rank else where
            sizes[rank] += math.prod(here.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return sizes
