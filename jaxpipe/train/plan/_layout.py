"""How many layers each stage has, and which rank has which stages."""

from dataclasses import dataclass

from ... import schedules
from ...models import ModelConfig
from ...sharding.layout import LayerLayout, divide_exactly, even_layout, parse_layout
from ._schedule_selection import (
    ScheduleRequest,
    ScheduleSelection,
    is_schedule_file,
    select_schedule,
)


@dataclass(frozen=True)
class LayerSettings:
    """What divides layers into stages: the model's sizes, and settings by the names of their keys.

    Attributes:
        sizes: The sizes of the model.
        pipeline_parallel_layers: Layers of the pipeline; -1 for as many as it may have.
        num_layers_per_pipeline_stage: Layers of a stage.
        num_pipeline_repeats: Stages per rank; -1 for as many as there are.
        pipeline_layout: The layers of every stage as text; "" if all have as many.
    """

    sizes: ModelConfig
    pipeline_parallel_layers: int
    num_layers_per_pipeline_stage: int
    num_pipeline_repeats: int
    pipeline_layout: str


def circular_layout(settings: LayerSettings, num_ranks: int) -> LayerLayout:
    """Assigns stages to ranks round-robin."""
    layers_per_repeat = num_ranks * settings.num_layers_per_pipeline_stage
    name, num_layers = _pipelined_layers(settings)
    divide_exactly(
        num_layers,
        layers_per_repeat,
        name=name,
        into="ranks x `num_layers_per_pipeline_stage`",
        fix=_divisibility_advice(settings.sizes.num_pipeline_layers, layers_per_repeat),
    )
    return even_layout(
        num_layers,
        num_ranks=num_ranks,
        layers_per_stage=settings.num_layers_per_pipeline_stage,
        num_repeats=settings.num_pipeline_repeats,
    )


def scheduled_layout(
    settings: LayerSettings, request: ScheduleRequest
) -> tuple[ScheduleSelection, LayerLayout]:
    """Selects the schedule, and assigns layers to the ranks that run their stages."""
    name, num_layers = _pipelined_layers(settings)
    counts = _layer_counts(settings, request, name, num_layers)
    selection = select_schedule(request, num_layers, counts)
    num_stages = selection.schedule.num_stages
    if counts:
        return selection, _layout_of_schedule(request, selection, counts)
    per_stage = divide_exactly(
        num_layers,
        num_stages,
        name=name,
        into="the stages of `pipeline_schedule`",
        fix=_divisibility_advice(settings.sizes.num_pipeline_layers, num_stages),
    )
    layout = _layout_of_schedule(request, selection, (per_stage,) * num_stages)
    _check_stage_counts(settings, request.name, layout)
    return selection, layout


def _layout_of_schedule(
    request: ScheduleRequest, selection: ScheduleSelection, counts: tuple[int, ...]
) -> LayerLayout:
    """Returns the layout of stages with these numbers of layers, on the ranks of the schedule."""
    schedule = selection.schedule
    return request.engine.layout(schedule, schedules.num_ranks(schedule), counts)


def _check_stage_counts(settings: LayerSettings, schedule_name: str, layout: LayerLayout) -> None:
    """Checks the schedule's stages per rank and layers per stage against the settings."""
    for name, usual, layout_count in (
        ("num_pipeline_repeats", -1, layout.num_repeats),
        ("num_layers_per_pipeline_stage", 1, layout.layers_per_stage),
    ):
        value = getattr(settings, name)
        if value not in (usual, layout_count):
            raise ValueError(
                f"`{name}` is {value}, but `pipeline_schedule` {schedule_name} has "
                f"{layout.num_repeats} stage(s) of {layout.layers_per_stage} layer(s) per rank. "
                f"Give {layout_count} or {usual}."
            )


def _layer_counts(
    settings: LayerSettings, request: ScheduleRequest, name: str, num_layers: int
) -> tuple[int, ...] | None:
    """Returns the number of layers of every stage in `pipeline_layout`, or None if it is empty."""
    if not settings.pipeline_layout:
        return None
    counts = parse_layout(settings.pipeline_layout)
    if sum(counts) != num_layers:
        raise ValueError(
            f"`pipeline_layout` has {sum(counts)} layers and {name} is {num_layers}. Change one."
        )
    if not is_schedule_file(request.name):
        divide_exactly(
            len(counts),
            request.num_ranks,
            name="The number of stages in `pipeline_layout`",
            into="the ranks of the pipeline",
            fix="Every rank has as many.",
        )
    return counts


def _pipelined_layers(settings: LayerSettings) -> tuple[str, int]:
    """Returns the key or keys that determine the number of pipelined layers, and that number."""
    num_requested, available = settings.pipeline_parallel_layers, settings.sizes.num_pipeline_layers
    step = settings.sizes.layers_per_block
    of_blocks = f", each a block of `interleave_moe_layer_step` = {step}" if step > 1 else ""
    if num_requested > available:
        raise ValueError(
            f"`pipeline_parallel_layers` is {num_requested}, and there are {available} layers for "
            f"a pipeline{of_blocks}. Give 1 to {available}, or -1 for all of them."
        )
    if num_requested != -1:
        return "`pipeline_parallel_layers`", num_requested
    dense = " - `first_num_dense_layers`" if settings.sizes.num_dense_layers else ""
    blocks = " / `interleave_moe_layer_step`" if step > 1 else ""
    return f"`base_num_decoder_layers`{dense}{blocks}", available


def _divisibility_advice(available: int, layers_per_repeat: int) -> str:
    """Returns advice for layers that do not divide into stages."""
    advice = "Choose ranks and layers per stage whose product divides the layers"
    if available < layers_per_repeat:
        return advice + "."
    fits = available - available % layers_per_repeat
    return f"{advice}, or `pipeline_parallel_layers={fits}`: the others run after the pipeline."
