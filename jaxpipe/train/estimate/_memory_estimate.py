"""Estimates the memory of a run from shapes, without compiling anything, as its engine says it.

A run is refused, before anything is allocated, if its devices cannot hold it.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ..._input import shorten
from ...devices import host_bytes
from ...engines import PeakMemory, Sharded, StepSizes, most_bytes_for_several_of
from ...models import ModelConfig
from ...planner import StepLayout
from ...planner.memory import step_counts, step_sizes
from ...schedules import language
from ...sharding import AXES
from ..plan._devices import BatchPlan
from ..plan._setup import StepPlan
from ..step._state import of_gradients, state_shapes
from ..step._step import stored_shardings
from ._planned_model import planned_model

_SURE = 0.85
"""The least share of its estimate that a step may need (docs/plan.md)."""


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
    pipeline, batch, remat = plan.pipeline, plan.batch, plan.model.remat
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
        vocab_tiling=plan.state.config.num_vocab_tiling,
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
        plan.state.config,
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


def check_fits(plan: StepPlan) -> None:
    """Checks that the devices of this process have the memory that a run needs.

    A run is refused only if it needs more even where the estimate is too high.
    """
    devices = plan.pipeline.mesh.local_devices
    peak = max(estimate_memory(plan), key=lambda peak: peak.total)
    batch = sum(array.size * array.dtype.itemsize for array in plan.batch.shapes.values())
    on_host = devices[0].platform == "cpu"
    # Emulated devices share the memory of the host, where batches are made too.
    needed = peak.total * len(devices) + batch if on_host else peak.total
    most = device_bytes(devices[0])
    if most and _SURE * needed > most:
        keys = _deciding_values(plan.state.weights.sizes, plan.batch)
        where = "this host" if on_host else "a device"
        raise ValueError(_message(keys, peak, f"{needed / 1e9:.3g} GB, and {where} has", most))


def device_bytes(device: Any) -> int:
    """Returns the bytes of a device, of the host for one that it emulates; 0 if it is unknown."""
    if device.platform == "cpu":
        return host_bytes()
    return (device.memory_stats() or {}).get("bytes_limit", 0)


def _deciding_values(sizes: ModelConfig, batch: BatchPlan) -> str:
    """Returns the keys that decide how much memory a run needs, with their values."""
    names = ["base_emb_dim", "base_mlp_dim", "base_num_decoder_layers", "vocab_size"]
    if hasattr(sizes, "num_experts"):
        names += ["num_experts", "base_moe_mlp_dim"]
    values = {name: getattr(sizes, name) for name in names}
    rows = batch.num_microbatches * batch.microbatch_size  # of one call of the engine
    values["per_device_batch_size"] = rows / batch.devices.mesh.size
    values["max_target_length"] = batch.length
    return ", ".join(f"`{key}` {value}" for key, value in values.items())


def _message(keys: str, peak: PeakMemory, needed: str, most: int) -> str:
    kinds = ", ".join(f"{kind} {size / 1e9:.3g}" for kind, size in vars(peak).items())
    return (
        f"The run needs about {needed} {most / 1e9:.3g} GB. On each device in GB: {kinds}. These "
        f"keys decide it: {shorten(keys, 500)}. Make them smaller, or use more devices "
        f"(`ici_fsdp_parallelism`, `ici_pipeline_parallelism`; now {jax.device_count()})."
    )
