"""How many layers each stage has, and which rank has which stages."""

from ...models import ModelConfig
from ...sharding.layout import LayerLayout, divide_exactly, even_layout, parse_layout
from ..config._config import Config
from ._schedule_selection import ScheduleSelection, is_schedule_file, select_schedule


def circular_layout(config: Config, sizes: ModelConfig, num_ranks: int) -> LayerLayout:
    """Assigns stages to ranks round-robin."""
    layers_per_repeat = num_ranks * config.num_layers_per_pipeline_stage
    name, num_layers = _pipelined_layers(config, sizes)
    divide_exactly(
        num_layers,
        layers_per_repeat,
        name=name,
        into="ranks x `num_layers_per_pipeline_stage`",
        fix=_divisibility_advice(sizes.num_pipeline_layers, layers_per_repeat),
    )
    return even_layout(
        num_layers,
        num_ranks=num_ranks,
        layers_per_stage=config.num_layers_per_pipeline_stage,
        num_repeats=config.num_pipeline_repeats,
    )


def scheduled_layout(
    config: Config, sizes: ModelConfig, num_ranks: int, num_microbatches: int
) -> tuple[ScheduleSelection, LayerLayout]:
    """Selects the schedule, and assigns layers to the ranks that run their stages."""
    name, num_layers = _pipelined_layers(config, sizes)
    counts = _layer_counts(config, num_ranks, name, num_layers)
    selection = select_schedule(config, num_ranks, num_microbatches, num_layers, counts)
    schedule, num_stages = selection.schedule, selection.schedule.num_stages
    if counts:
        return selection, config.engine.layout(schedule, num_ranks, counts)
    per_stage = divide_exactly(
        num_layers,
        num_stages,
        name=name,
        into="the stages of `pipeline_schedule`",
        fix=_divisibility_advice(sizes.num_pipeline_layers, num_stages),
    )
    layout = config.engine.layout(schedule, num_ranks, (per_stage,) * num_stages)
    _check_stage_counts(config, layout)
    return selection, layout


def _check_stage_counts(config: Config, layout: LayerLayout) -> None:
    """Checks the schedule's stages per rank and layers per stage against those of the config."""
    for name, usual, layout_count in (
        ("num_pipeline_repeats", -1, layout.num_repeats),
        ("num_layers_per_pipeline_stage", 1, layout.layers_per_stage),
    ):
        value = getattr(config, name)
        if value not in (usual, layout_count):
            raise ValueError(
                f"`{name}` is {value}, but `pipeline_schedule` {config.pipeline_schedule} has "
                f"{layout.num_repeats} stage(s) of {layout.layers_per_stage} layer(s) per rank. "
                f"Give {layout_count} or {usual}."
            )


def _layer_counts(
    config: Config, num_ranks: int, name: str, num_layers: int
) -> tuple[int, ...] | None:
    """Returns the number of layers of every stage in `pipeline_layout`, or None if it is empty."""
    if not config.pipeline_layout:
        return None
    counts = parse_layout(config.pipeline_layout)
    if sum(counts) != num_layers:
        raise ValueError(
            f"`pipeline_layout` has {sum(counts)} layers and {name} is {num_layers}. Change one."
        )
    if not is_schedule_file(config.pipeline_schedule):
        divide_exactly(
            len(counts),
            num_ranks,
            name="The number of stages in `pipeline_layout`",
            into="the ranks of the pipeline",
            fix="Every rank has as many.",
        )
    return counts


def _pipelined_layers(config: Config, sizes: ModelConfig) -> tuple[str, int]:
    """Returns the key or keys that determine the number of pipelined layers, and that number."""
    num_requested, available = config.pipeline_parallel_layers, sizes.num_pipeline_layers
    step = sizes.layers_per_block
    of_blocks = f", each a block of `interleave_moe_layer_step` = {step}" if step > 1 else ""
    if num_requested > available:
        raise ValueError(
            f"`pipeline_parallel_layers` is {num_requested}, and there are {available} layers for "
            f"a pipeline{of_blocks}. Give 1 to {available}, or -1 for all of them."
        )
    if num_requested != -1:
        return "`pipeline_parallel_layers`", num_requested
    dense = " - `first_num_dense_layers`" if sizes.num_dense_layers else ""
    blocks = " / `interleave_moe_layer_step`" if step > 1 else ""
    return f"`base_num_decoder_layers`{dense}{blocks}", available


def _divisibility_advice(available: int, layers_per_repeat: int) -> str:
    """Returns advice for layers that do not divide into stages."""
    advice = "Choose ranks and layers per stage whose product divides the layers"
    if available < layers_per_repeat:
        return advice + "."
    fits = available - available % layers_per_repeat
    return f"{advice}, or `pipeline_parallel_layers={fits}`: the others run after the pipeline."
