"""Describes a run when it starts."""

import jax

from ... import schedules
from ...sharding.layout import LayerLayout
from ..plan._setup import Setup
from ..plan._weight_plan import WeightPlan


def describe(setup: Setup, done: int) -> str:
    """Describes a run in a few lines: the model, the mesh, the schedule and the microbatches."""
    config, batch, weights = setup.config, setup.batch, setup.state.weights
    millions, calls = weights.num_parameters / 1e6, batch.gradient_accumulation_steps
    axes = " x ".join(f"{axis} {size}" for axis, size in setup.mesh.shape.items() if size > 1)
    size = weights.sizes.layers_per_block
    outside = _layers_outside_stages(config.first_num_dense_layers, weights.num_layers_after)
    lines = [
        f"{config.model_name}: {millions:.2f}M parameters, {config.base_num_decoder_layers} layers"
        + (f" in blocks of {size}" if size > 1 else ""),
        f"engine {config.pipeline_engine} on {axes or 'one device'}: {_stages(weights)} x "
        f"{_layers_per_stage(weights.layout)} layer(s){outside}, "
        f"{batch.num_microbatches} microbatches of {batch.microbatch_size} x "
        f"{batch.length} tokens" + (f", {calls} times a step" if calls > 1 else ""),
    ]
    lines += dict.fromkeys(plan.reason for plan in setup.step.model.attentions)
    if setup.schedule_reason is not None:
        lines.append(f"schedule {setup.schedule_reason}")
    elif timeline := setup.step.predicted_timeline:
        lines.append(f"schedule circular: bubble {schedules.bubble_fraction(timeline):.1%}")
    if config.debug_sharding:
        lines += _sharding_lines(setup)
    if done:
        lines.append(f"resumed after step {done}")
    return "\n".join(lines)


def _sharding_lines(setup: Setup) -> list[str]:
    """Returns a line for every weight: its shape, and the mesh axes that shard each dim."""
    plan, stored = setup.pipeline, setup.step.groups
    storage, tied = setup.step.engine.storage, setup.state.weights.tied
    where = jax.tree.leaves(storage.shardings(plan, stored, tied))
    leaves = jax.tree_util.tree_leaves_with_path(stored)
    names = (jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves)
    return [
        f"{name}: {list(leaf.shape)} over {sharding.spec}"
        for name, (_, leaf), sharding in zip(names, leaves, where, strict=True)
    ]


def _stages(weights: WeightPlan) -> str:
    layout = weights.layout
    if weights.per_stage:
        return f"{len(layout.stage_layer_ids)} stage(s) on {layout.num_ranks} rank(s)"
    return f"{layout.num_repeats} repeat(s) x {layout.num_ranks} rank(s)"


def _layers_per_stage(layout: LayerLayout) -> str:
    """Returns the number of layers of a stage, or the least and the greatest number."""
    counts = list(map(len, layout.stage_layer_ids))
    least, most = min(counts), max(counts)
    return f"{most}" if least == most else f"{least} to {most}"


def _layers_outside_stages(before: int, after: int) -> str:
    """Returns a text on the layers outside of all stages; "" if there are none."""
    parts = [f"{count} {where}" for count, where in ((before, "before"), (after, "after")) if count]
    return f" ({' and '.join(parts)} them)" if parts else ""
