"""Selects the schedule that the engines `scheduled` and `mpmd` run, and says why.

`scheduled` runs it in lock-step, where it costs the sum of its ticks. With `mpmd` every rank starts
an action as soon as its inputs have arrived.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ... import schedules
from ...engines import Engine
from ...schedules import Costs, Schedule, Timeline, builders, language, lock_step

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


@dataclass(frozen=True)
class ScheduleRequest:
    """The schedule that a run asks for.

    Attributes:
        engine: The engine that runs it.
        name: The value of `pipeline_schedule`.
        num_ranks: S, the ranks of the pipeline.
        num_microbatches: M, those of one call of the engine.
        num_pipeline_repeats: Stages per rank; -1 leaves it open.
        num_layers_per_pipeline_stage: Layers of a stage; 1 leaves it open.
        recomputes: Whether backwards compute the forward again, or a part of it.
        gathers_per_repeat: Whether the weights of a stage are gathered ahead of each repeat.
        num_pipeline_slices: Slices of each sequence; -1 leaves it open.
        length: T, the number of tokens of a sequence.
        slice_problems: Why sequences cannot be cut into slices, whatever their number.
    """

    engine: Engine
    name: str
    num_ranks: int
    num_microbatches: int
    num_pipeline_repeats: int = -1
    num_layers_per_pipeline_stage: int = 1
    recomputes: bool = True
    gathers_per_repeat: bool = False
    num_pipeline_slices: int = -1
    length: int = 1
    slice_problems: tuple[str, ...] = ()


def select_schedule(
    request: ScheduleRequest, num_layers: int, counts: tuple[int, ...] | None = None
) -> ScheduleSelection:
    """Selects the schedule that has the name, or for `auto` 1F1B or interleaved 1F1B."""
    name, num_ranks, num_microbatches = request.name, request.num_ranks, request.num_microbatches
    chunks = len(counts) // num_ranks if counts else _configured_chunks(request, num_layers)
    if name == "auto":
        fitting = (
            (chunks,) if chunks else _candidate_chunks(num_ranks, num_microbatches, num_layers)
        )
        return _select_auto(request, fitting, counts)
    if is_schedule_file(name):
        schedule = schedules.read_csv(name)
        _check_shape(name, schedule, num_ranks, num_microbatches)
    else:
        num_chunks = chunks or num_layers // num_ranks
        slices = request.num_pipeline_slices
        schedule = _build_schedule(name, num_ranks, num_microbatches, num_chunks, slices)
    _check_slices(request, schedule)
    if counts and len(counts) != schedule.num_stages:
        raise ValueError(
            f"`pipeline_layout` has {len(counts)} stages and `pipeline_schedule` {name} has "
            f"{schedule.num_stages}. They must be equal."
        )
    _check_weight_gather(request, schedule)
    costs = stage_costs(counts, recomputes=request.recomputes)
    with _errors_name_schedule(name):
        return _select_and_time(request.engine, name, schedule, costs)[0]


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


def _configured_chunks(request: ScheduleRequest, num_layers: int) -> int | None:
    """Returns the number of stages per rank, or None if the request leaves it open."""
    if request.num_pipeline_repeats != -1:
        return request.num_pipeline_repeats
    per_stage = request.num_layers_per_pipeline_stage
    return None if per_stage == 1 else max(1, num_layers // (request.num_ranks * per_stage))


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


def _check_slices(request: ScheduleRequest, schedule: Schedule) -> None:
    """Checks that a run can have the slices of a schedule, if it has any."""
    slices, num_requested = language.num_slices(schedule), request.num_pipeline_slices
    if num_requested not in (-1, slices):
        raise ValueError(
            f"`num_pipeline_slices` is {num_requested}, but `pipeline_schedule` {request.name} has "
            f"{slices} slice(s) of each sequence. Give {slices} or -1."
        )
    if slices == 1:
        return
    problems = list(request.slice_problems)
    if request.length % slices:
        problems.append(f"`max_target_length` is {request.length}, which they do not divide")
    if problems:
        raise ValueError(
            f"`pipeline_schedule` {request.name} cuts sequences into {slices} slices, but "
            f"{'; '.join(problems)}. Change that, or give a schedule of whole microbatches, such "
            "as 1f1b."
        )


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


def _check_weight_gather(request: ScheduleRequest, schedule: Schedule) -> None:
    """Refuses split backwards with gathers per repeat, which hold weights for F and B alone."""
    if language.splits_backwards(schedule) and request.gathers_per_repeat:
        raise ValueError(
            f"`pipeline_fsdp_ag_per_repeat` is true and `pipeline_schedule` is {request.name!r}, "
            "which splits backwards: when W comes, the weights of its "
            "stage are gone. Give `pipeline_fsdp_ag_once` or `pipeline_fsdp_ag_per_layer` "
            "instead, or a schedule of whole backwards."
        )


def _select_auto(
    request: ScheduleRequest, fitting: tuple[int, ...], counts: tuple[int, ...] | None
) -> ScheduleSelection:
    """Selects 1F1B, or interleaved 1F1B with as many chunks as save 2% of the step each time.

    Schedules that split the backward are left out: residuals from I to W are many times as large as
    the input of a stage. `fitting` are the stages per rank to try, in ascending order.
    """
    num_ranks, num_microbatches = request.num_ranks, request.num_microbatches
    costs = stage_costs(counts, recomputes=request.recomputes)
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
        selection, time = _select_and_time(request.engine, description, schedule, costs)
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
