"""Describes a run when it starts."""

import jax

from ... import schedules
from ...models.weights._abstract import weight_shapes
from ..estimate._timeline import predicted_timeline
from ..plan._setup import Setup, weight_shardings


def describe(setup: Setup, done: int) -> str:
    """Describes a run in a few lines: the model, the mesh, the schedule and the microbatches.

    Args:
        setup: The run.
        done: The step from which it resumes; 0 for a new run.

    Returns:
        The lines, joined.
    """
    config = setup.config
    millions = setup.num_parameters / 1e6
    axes = " x ".join(f"{axis} {size}" for axis, size in setup.mesh.shape.items() if size > 1)
    lines = [
        f"{config.model_name}: {millions:.2f}M parameters, {config.base_num_decoder_layers} layers",
        f"engine {config.pipeline_engine} on {axes or 'one device'}: {_stages(setup)} x "
        f"{_layers_per_stage(setup)} layer(s){_layers_outside_stages(setup)}, "
        f"{setup.num_microbatches} microbatches of {setup.microbatch_size} x "
        f"{config.max_target_length} tokens{_calls(setup)}",
    ]
    if setup.schedule_selection is not None:
        lines.append(f"schedule {setup.schedule_selection.reason}")
    elif (timeline := predicted_timeline(setup)) is not None:
        lines.append(f"schedule circular: bubble {schedules.bubble_fraction(timeline):.1%}")
    if config.debug_sharding:
        lines += sharding_lines(setup)
    if done:
        lines.append(f"resumed after step {done}")
    return "\n".join(lines)


def sharding_lines(setup: Setup) -> list[str]:
    """Returns a line for every weight: its shape, and the mesh axes that shard each dim."""
    shapes = jax.tree_util.tree_leaves_with_path(weight_shapes(setup.abstract_weights))
    specs = (sharding.spec for sharding in jax.tree.leaves(weight_shardings(setup)))
    return [
        f"{jax.tree_util.keystr(path, simple=True, separator='.')}: {list(leaf.shape)} over {spec}"
        for (path, leaf), spec in zip(shapes, specs, strict=True)
    ]


def _stages(setup: Setup) -> str:
    layout = setup.layout
    if setup.per_stage_state:
        return f"{len(layout.stage_layer_ids)} stage(s) on {layout.num_ranks} rank(s)"
    return f"{layout.num_repeats} repeat(s) x {layout.num_ranks} rank(s)"


def _layers_per_stage(setup: Setup) -> str:
    """Returns the number of layers of a stage, or the least and the greatest number."""
    counts = list(map(len, setup.layout.stage_layer_ids))
    least, most = min(counts), max(counts)
    return f"{most}" if least == most else f"{least} to {most}"


def _calls(setup: Setup) -> str:
    return (
        f", {setup.gradient_accumulation_steps} times a step"
        if setup.gradient_accumulation_steps > 1
        else ""
    )


def _layers_outside_stages(setup: Setup) -> str:
    """Returns a text on the layers outside of all stages; "" if there are none."""
    before, after = setup.config.first_num_dense_layers, setup.num_layers_after_pipeline
    parts = [f"{count} {where}" for count, where in ((before, "before"), (after, "after")) if count]
    return f" ({' and '.join(parts)} them)" if parts else ""
