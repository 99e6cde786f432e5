"""How many layers each stage has, and which rank has which stages, from the keys of a config."""

from ... import schedules
from ...sharding.layout import LayerLayout, divide_exactly, even_layout, parse_layout
from ..config._config import Config
from ._schedule_selection import ScheduleSelection, is_schedule_file, select_schedule


def num_uniform_layers(config: Config) -> int:
    """Returns the number of layers a pipeline may have: all but dense ones before MoE layers."""
    return config.base_num_decoder_layers - config.first_num_dense_layers


def circular_layout(config: Config, num_ranks: int) -> LayerLayout:
    """Assigns stages to ranks round-robin; without a pipeline, all layers are one stage.

    Args:
        config: The config of the run.
        num_ranks: S.

    Returns:
        The layout of the layers.

    Raises:
        ValueError: If the layers do not divide into the stages.
    """
    if not config.engine.pipelines:
        return LayerLayout(1, 1, num_uniform_layers(config))
    layers_per_repeat = num_ranks * config.num_layers_per_pipeline_stage
    name, num_layers = _pipelined_layers(config)
    divide_exactly(
        num_layers,
        layers_per_repeat,
        name=name,
        into="ranks x `num_layers_per_pipeline_stage`",
        fix=_divisibility_advice(num_uniform_layers(config), layers_per_repeat),
    )
    return even_layout(
        num_layers,
        num_ranks=num_ranks,
        layers_per_stage=config.num_layers_per_pipeline_stage,
        num_repeats=config.num_pipeline_repeats,
    )


def scheduled_layout(
    config: Config, num_ranks: int, num_microbatches: int
) -> tuple[ScheduleSelection, LayerLayout]:
    """Selects the schedule, and assigns layers to the ranks that run their stages.

    Args:
        config: The config of the run.
        num_ranks: S.
        num_microbatches: M.

    Returns:
        The selected schedule, and the layout of the layers.

    Raises:
        ValueError: If the schedule does not fit the ranks, microbatches or layers.
    """
    name, num_layers = _pipelined_layers(config)
    counts = _layer_counts(config, name, num_layers, num_ranks)
    selection = select_schedule(
        config,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_layers=num_layers,
        counts=counts,
    )
    num_stages = selection.schedule.num_stages
    if counts:
        return selection, _layout_of_schedule(config, selection, counts)
    per_stage = divide_exactly(
        num_layers,
        num_stages,
        name=name,
        into="the stages of `pipeline_schedule`",
        fix=_divisibility_advice(num_uniform_layers(config), num_stages),
    )
    layout = _layout_of_schedule(config, selection, (per_stage,) * num_stages)
    _check_stage_counts(config, layout)
    return selection, layout


def _layout_of_schedule(
    config: Config, selection: ScheduleSelection, counts: tuple[int, ...]
) -> LayerLayout:
    """Returns the layout of stages with these numbers of layers, on the ranks of the schedule."""
    schedule = selection.schedule
    return config.engine.layout(schedule, schedules.num_ranks(schedule), counts)


def _check_stage_counts(config: Config, layout: LayerLayout) -> None:
    """Checks the schedule's stages per rank and layers per stage against the config."""
    for name, usual, found in (
        ("num_pipeline_repeats", -1, layout.num_repeats),
        ("num_layers_per_pipeline_stage", 1, layout.layers_per_stage),
    ):
        value = getattr(config, name)
        if value not in (usual, found):
            raise ValueError(
                f"`{name}` is {value}, but `pipeline_schedule` {config.pipeline_schedule} has "
                f"{layout.num_repeats} stage(s) of {layout.layers_per_stage} layer(s) per rank. "
                f"Give {found} or {usual}."
            )


def _layer_counts(
    config: Config, name: str, num_layers: int, num_ranks: int
) -> tuple[int, ...] | None:
    """Returns the number of layers of every stage in `pipeline_layout`, or None if it is empty."""
    if not config.pipeline_layout:
        return None
    counts = parse_layout(config.pipeline_layout)
    if sum(counts) != num_layers:
        raise ValueError(
            f"`pipeline_layout` has {sum(counts)} layers and {name} is {num_layers}. Change one."
        )
    if not is_schedule_file(config):
        divide_exactly(
            len(counts),
            num_ranks,
            name="The number of stages in `pipeline_layout`",
            into="the ranks of the pipeline",
            fix="Every rank has as many.",
        )
    return counts


def _pipelined_layers(config: Config) -> tuple[str, int]:
    """Returns the key or keys that determine the number of pipelined layers, and that number."""
    wanted, available = config.pipeline_parallel_layers, num_uniform_layers(config)
    if wanted > available:
        raise ValueError(
            f"`pipeline_parallel_layers` is {wanted}, and there are {available} layers for a "
            f"pipeline. Give 1 to {available}, or -1 for all of them."
        )
    if wanted != -1:
        return "`pipeline_parallel_layers`", wanted
    dense = " - `first_num_dense_layers`" if config.first_num_dense_layers else ""
    return f"`base_num_decoder_layers`{dense}", available


def _divisibility_advice(available: int, layers_per_repeat: int) -> str:
    """Returns advice for layers that do not divide into stages."""
    advice = "Choose ranks and layers per stage whose product divides the layers"
    if available < layers_per_repeat:
        return advice + "."
    fits = available - available % layers_per_repeat
    return f"{advice}, or `pipeline_parallel_layers={fits}`: the others run after the pipeline."
