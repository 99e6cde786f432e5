"""Selects the schedule of a run, and says why; gives every stage its layers and its rank.

`scheduled` runs it in lock-step, where it costs the sum of its ticks. With `mpmd` every rank starts
an action as soon as its inputs have arrived.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ... import schedules
from ...engines import Engine
from ...models import MODEL_FAMILIES, ModelConfig
from ...schedules import Costs, Schedule, Timeline, builders, language, lock_step
from ...sharding.layout import LayerLayout, divide_exactly, even_layout, parse_layout
from ..config._config import Config

_MAX_TIME_RATIO = 0.98
"""More chunks per rank are taken only if they cut a step's time to this share or less."""


@dataclass(frozen=True)
class ScheduleSelection:
    """A schedule, and one line that says why it was selected.

    Attributes:
        schedule: The actions of every rank, in order.
        reason: One line that says why it was selected.
        costs: The costs of its stages.
    """

    schedule: Schedule
    reason: str
    costs: Costs


def select_schedule(
    config: Config,
    num_ranks: int,
    num_microbatches: int,
    num_layers: int,
    counts: tuple[int, ...] | None = None,
) -> ScheduleSelection:
    """Selects the schedule that a config names, or for `auto` 1F1B or interleaved 1F1B."""
    name = config.pipeline_schedule
    chunks = (
        len(counts) // num_ranks if counts else _configured_chunks(config, num_ranks, num_layers)
    )
    if name == "auto":
        fitting = (
            (chunks,) if chunks else _candidate_chunks(num_ranks, num_microbatches, num_layers)
        )
        return _select_auto(config, num_ranks, num_microbatches, fitting, counts)
    if is_schedule_file(name):
        schedule = schedules.read_csv(name)
        _check_shape(name, schedule, num_ranks, num_microbatches)
    else:
        num_chunks = chunks or num_layers // num_ranks
        slices = config.num_pipeline_slices
        schedule = _build_schedule(name, num_ranks, num_microbatches, num_chunks, slices)
    _check_slices(config, schedule)
    if counts and len(counts) != schedule.num_stages:
        raise ValueError(
            f"`pipeline_layout` has {len(counts)} stages and `pipeline_schedule` {name} has "
            f"{schedule.num_stages}. They must be equal."
        )
    _check_weight_gather(config, schedule)
    costs = stage_costs(counts, recomputes=config.remat_policy != "none")
    with _errors_name_schedule(name):
        return _select_and_time(config.engine, name, schedule, costs)[0]


def is_schedule_file(name: str) -> bool:
    """Returns whether the schedule with this name is read from a file."""
    return name not in schedules.FAMILIES and (name.endswith(".csv") or Path(name).is_file())


def stage_costs(counts: tuple[int, ...] | None = None, *, recomputes: bool) -> Costs:
    """Returns costs of a transformer's stages by matrix products: I and W cost as much as F.

    They are in tenths of a layer's forward, or of a stage's if no counts are given. With
    rematerialisation, I also computes F again, or a part of it.
    """
    unit = 10 if counts is None else tuple(10 * count for count in counts)
    again = 2 if recomputes else 1
    inputs = 10 * again if counts is None else tuple(10 * again * count for count in counts)
    return Costs(forward=unit, input=inputs, weight=unit)


def _configured_chunks(config: Config, num_ranks: int, num_layers: int) -> int | None:
    """Returns the number of stages per rank, or None if the config leaves it open."""
    if config.num_pipeline_repeats != -1:
        return config.num_pipeline_repeats
    per_stage = config.num_layers_per_pipeline_stage
    return None if per_stage == 1 else max(1, num_layers // (num_ranks * per_stage))


def _build_schedule(
    name: str, num_ranks: int, num_microbatches: int, chunks: int, slices: int = -1
) -> Schedule:
    with _errors_name_schedule(name):
        takes = builders.get_family(name).takes
        return schedules.build(
            name,
            ranks=num_ranks,
            microbatches=num_microbatches,
            chunks=max(1, chunks) if "chunks" in takes else None,
            slices=slices if "slices" in takes and slices != -1 else None,
        )


def _check_slices(config: Config, schedule: Schedule) -> None:
    """Checks that a run can have the slices of a schedule, if it has any."""
    slices, num_requested = language.num_slices(schedule), config.num_pipeline_slices
    name = config.pipeline_schedule
    if num_requested not in (-1, slices):
        raise ValueError(
            f"`num_pipeline_slices` is {num_requested}, but `pipeline_schedule` {name} has "
            f"{slices} slice(s) of each sequence. Give {slices} or -1."
        )
    if slices == 1:
        return
    problems = _slice_problems(config)
    if config.max_target_length % slices:
        problems.append(
            f"`max_target_length` is {config.max_target_length}, which they do not divide"
        )
    if problems:
        raise ValueError(
            f"`pipeline_schedule` {name} cuts sequences into {slices} slices, but "
            f"{'; '.join(problems)}. Change that, or give a schedule of whole microbatches, such "
            "as 1f1b."
        )


def _slice_problems(config: Config) -> list[str]:
    """Returns the reasons for which a run cannot cut sequences into slices at all."""
    family = MODEL_FAMILIES[config.decoder_block]
    problems = {
        f"`dropout_rate` is {config.dropout_rate:g}, and masks of slices are not those of whole "
        "sequences": config.active_dropout_rate > 0,
        f"`decoder_block` is {config.decoder_block!r}, whose experts are balanced over whole "
        "sequences": not family.has_slices,
        f"`pipeline_parallel_layers` is {config.pipeline_parallel_layers}, and layers after the "
        "pipeline need whole sequences": (
            config.pipeline_parallel_layers not in (-1, config.base_num_decoder_layers)
        ),
        f"`attention` is {config.attention!r}, which needs whole sequences": (
            config.attention not in ("auto", "dot_product")
        ),
        f"`enable_nnx` is {config.enable_nnx}, and modules run whole sequences": (
            config.enable_nnx is not None
        ),
        "sequences are split over the axis 'context'": (
            max(config.ici_context_parallelism, config.dcn_context_parallelism) > 1
        ),
    }
    return [problem for problem, applies in problems.items() if applies]


def _select_and_time(
    engine: Engine, description: str, schedule: Schedule, costs: Costs
) -> tuple[ScheduleSelection, float]:
    """Returns the schedule as the engine runs it, and its makespan in units of `costs`."""
    shape = schedules.num_ranks(schedule), schedule.num_microbatches
    as_run, ticks = engine.prepare(schedules.check(schedule), *shape, costs, None)
    assert as_run is not None, "the engine runs schedules"
    activations = _describe_activations(as_run)
    if ticks is None:
        timeline = schedules.simulate(as_run, costs)
        reason = f"{description}: {_describe_bubble(timeline)}, {activations}"
    else:
        timeline = lock_step.simulate_ticks(ticks, costs)
        bubble, num_ticks = _describe_bubble(timeline), lock_step.num_ticks(ticks)
        reason = f"{description}: {num_ticks} ticks, {bubble} in lock-step, {activations}"
    return ScheduleSelection(as_run, reason, costs), float(schedules.makespan(timeline))


def _describe_bubble(timeline: Timeline) -> str:
    return f"bubble {schedules.bubble_fraction(timeline):.1%}"


def _describe_activations(schedule: Schedule) -> str:
    held = f"{max(schedules.peak_activations(schedule))} stage inputs held at most"
    slices = language.num_slices(schedule)
    return held if slices == 1 else f"{held}, each of 1/{slices} of a sequence"


@contextmanager
def _errors_name_schedule(name: str) -> Iterator[None]:
    """Adds the key `pipeline_schedule` and its value to errors about a schedule."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"`pipeline_schedule` is {name!r}. {error}") from None


def _check_shape(name: str, schedule: Schedule, num_ranks: int, num_microbatches: int) -> None:
    """Checks that a schedule read from a file is for these ranks and microbatches."""
    shape = schedules.num_ranks(schedule), schedule.num_microbatches
    if shape != (num_ranks, num_microbatches):
        raise ValueError(
            f"`pipeline_schedule` {name} is for {shape[0]} ranks and {shape[1]} microbatches, but "
            f"the mesh has {num_ranks} ranks and `num_pipeline_microbatches` is "
            f"{num_microbatches}. Give another file, or change these."
        )


def _check_weight_gather(config: Config, schedule: Schedule) -> None:
    """Refuses split backwards with gathers per repeat, which hold weights for F and B alone."""
    if language.splits_backwards(schedule) and config.pipeline_fsdp_ag_per_repeat:
        raise ValueError(
            "`pipeline_fsdp_ag_per_repeat` is true and `pipeline_schedule` is "
            f"{config.pipeline_schedule!r}, which splits backwards: when W comes, the weights of "
            "its stage are gone. Give `pipeline_fsdp_ag_once` or `pipeline_fsdp_ag_per_layer` "
            "instead, or a schedule of whole backwards."
        )


def _select_auto(
    config: Config,
    num_ranks: int,
    num_microbatches: int,
    fitting: tuple[int, ...],
    counts: tuple[int, ...] | None,
) -> ScheduleSelection:
    """Selects 1F1B, or interleaved 1F1B with as many chunks as save 2% of the step each time.

    Schedules that split the backward are left out: residuals from I to W are many times as large as
    the input of a stage. `fitting` are the stages per rank to try, in ascending order.
    """
    costs = stage_costs(counts, recomputes=config.remat_policy != "none")
    best, least = None, 0.0
    if min(fitting) > 1 and not _has_equal_groups(num_ranks, num_microbatches):
        raise ValueError(
            f"`pipeline_schedule` is 'auto', and with {fitting[0]} stages per rank, as the config "
            f"has it, interleaved 1F1B passes {num_microbatches} microbatches over {num_ranks} "
            "ranks in unequal groups. Change `num_pipeline_microbatches`, or name a schedule."
        )
    for chunks in fitting:
        name = builders.family_of_1f1b(chunks)
        description = name if chunks == 1 else f"{name} with {chunks} stages per rank"
        schedule = _build_schedule(name, num_ranks, num_microbatches, chunks)
        selection, time = _select_and_time(config.engine, description, schedule, costs)
        if best is None or time / chunks < least * _MAX_TIME_RATIO:
            best, least = selection, time / chunks
    assert best is not None
    return best


def _candidate_chunks(num_ranks: int, num_microbatches: int, num_layers: int) -> tuple[int, ...]:
    """Returns the numbers of stages that a rank may have, in ascending order."""
    groups = _has_equal_groups(num_ranks, num_microbatches)
    fitting = [v for v in (2, 3, 4) if groups and num_layers % (v * num_ranks) == 0]
    return (1, *fitting)


def _has_equal_groups(num_ranks: int, num_microbatches: int) -> bool:
    """Returns whether interleaved schedules would have groups of equally many microbatches."""
    return num_microbatches % max(1, num_microbatches // num_ranks) == 0


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
