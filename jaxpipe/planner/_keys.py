"""The keys of a run that a candidate stands for, and the run that they set up."""

from collections.abc import Sequence
from typing import Any

from ..sharding import AXES
from ..train import Config, set_up
from ..train.plan import Setup
from ._candidates import StepLayout
from ._own_model import PreparedPipeline, own_run, own_settings
from ._request import AXIS_KEYS, GATHER_KEYS, Request, Values, base_values, layout_text


def keys(candidate: StepLayout, request: Request) -> Values:
    """Returns the keys of a run with this layout.

    Returns:
        Values by key: those that the request passes on, and those that the layout decides. For
        a model of plain functions the arguments of `jaxpipe.pipeline`.
    """
    if request.own is not None:
        return own_settings(candidate)
    values = dict(request.values) | _mesh(candidate, request.devices.num_slices)
    values["pipeline_engine"] = candidate.engine_name
    values["num_pipeline_microbatches"] = candidate.microbatches
    values["remat_policy"] = candidate.policy
    if candidate.accumulation > 1:
        values["gradient_accumulation_steps"] = candidate.accumulation
    if candidate.vocab_tiling > 1:
        values["num_vocab_tiling"] = candidate.vocab_tiling
    if not candidate.engine.pipelines:
        return values
    values["set_remat_policy_on_pipeline_iterations"] = candidate.scope != "layer"
    values["set_remat_policy_on_layers_per_stage"] = candidate.scope != "tick"
    if candidate.gather in GATHER_KEYS:
        values[GATHER_KEYS[candidate.gather]] = True
    if not candidate.engine.runs_schedules:
        values["num_layers_per_pipeline_stage"] = candidate.layers_per_stage
        return values
    values["pipeline_schedule"] = candidate.schedule
    if len(set(candidate.counts)) > 1:
        values["pipeline_layout"] = layout_text(candidate.counts)
    elif candidate.chunks > 1:
        values["num_pipeline_repeats"] = candidate.chunks
    return values


def _mesh(candidate: StepLayout, num_slices: int) -> Values:
    """Returns the sizes of the mesh inside a slice and across slices."""
    axis_sizes: Values = {}
    for axis, size in zip(AXES, candidate.mesh, strict=True):
        across = num_slices if axis == candidate.across else 1
        axis_sizes[f"ici_{AXIS_KEYS[axis]}_parallelism"] = size // across
        if across > 1:
            axis_sizes[f"dcn_{AXIS_KEYS[axis]}_parallelism"] = across
    return axis_sizes


def checked_run(
    candidate: StepLayout, request: Request, devices: Sequence[Any]
) -> PreparedPipeline:
    """Sets up the run of a candidate, by the checks of the trainer and no others.

    Raises:
        ValueError: If the run would be refused.
    """
    if request.own is not None:
        return own_run(candidate, devices)
    step = checked_setup(keys(candidate, request), devices).step
    return PreparedPipeline(step.engine, step.pipeline)


def checked_setup(settings: Values, devices: Sequence[Any]) -> Setup:
    """Sets up a run by its keys.

    Raises:
        ValueError: If the run would be refused.
    """
    return set_up(Config(**base_values(settings)), devices)
