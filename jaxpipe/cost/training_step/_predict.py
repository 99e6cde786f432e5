"""The prediction of a step: stages and their schedule, gradients and optimizer together."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from ...devices import Hardware
from ...schedules import FAMILIES, Costs, Schedule, build, makespan, simulate
from ...schedules.analysis import busy_times
from ...schedules.language import actions_of, num_slices
from ..work import ModelWork, flops_per_token
from ._efficiency import Efficiency, efficiency
from ._layer_time import (
    ActionSeconds,
    Layers,
    add,
    device_parameters,
    gather_seconds,
    scaled,
    scatter_seconds,
    split_layers,
    stage_seconds,
)
from ._layout import Layout
from ._network import Device, all_gather_seconds, make_device, make_group, send_seconds

KINDS = (
    *("products", "other_compute", "attention_scores", "head_and_embedding", "optimizer", "bubble"),
    *("tensor", "fsdp", "gradient_reduction", "point_to_point", "experts", "context"),
)


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a step."""

    seconds: float  # the time of a step
    # Its seconds by kind, on the busiest rank, which add up to `seconds`: "products" and
    # "other_compute" of layers, "attention_scores" that are written to memory where no kernel
    # computes attention, "head_and_embedding", "optimizer", "bubble", and what is exposed of
    # communication: "tensor", "fsdp" (gathers and scatters), "gradient_reduction",
    # "point_to_point", "experts" and "context".
    parts: dict[str, float]
    tokens_per_second: float  # the tokens that all devices together process in a second
    # Operations of forward and backward, as `flops_per_token` counts them, divided by the peak of
    # the devices in bfloat16.
    model_flops_utilization: float
    bubble_fraction: float  # the part of the schedule's time in which even the busiest rank waits
    forward: tuple[float, ...]  # [stages, in forward order] seconds of F of one microbatch
    input: tuple[float, ...]  # [stages] seconds of I
    weight: tuple[float, ...]  # [stages] seconds of W
    transfer: float  # seconds of one hand-over between ranks


def predict(
    work: ModelWork, layout: Layout, hardware: Hardware, *, reached: Efficiency | None = None
) -> Prediction:
    """Predicts the time of a training step, by default with the fitted fractions of peaks."""
    reached = reached or efficiency(hardware, layout.dtype)
    device = make_device(layout, hardware, reached)
    fewer = None if isinstance(layout.schedule, Schedule) else shorter(layout)
    schedule = build_schedule(fewer[0] if fewer else layout)
    num_stages = schedule.num_stages if schedule else 1
    layers = split_layers(work, num_stages, layout)
    stages = stage_seconds(work, layers, layout, device)
    sent = work.layers[-1].boundary_bytes * layout.tokens / layout.tensor
    transfer = send_seconds(sent, layout, device)
    if schedule and "point_to_point" not in layout.overlap:
        counts = num_transfers(schedule)
        stages = [
            _with_transfers(stage, count * transfer)
            for stage, count in zip(stages, counts, strict=True)
        ]
        transfer = 0.0
    forward, back, weight = (
        tuple(sum(getattr(stage, name).values(), 0.0) for stage in stages)
        for name in ("forward", "input", "weight")
    )
    costs = StageSeconds(forward, back, weight, transfer)
    time = costs.of(schedule, layout.microbatches)
    if fewer:
        time = _extrapolate(time, costs.of(build_schedule(fewer[1]), 0), fewer, layout)
    rank = max(range(len(time.busy)), key=time.busy.__getitem__)
    own = _stage_shares(schedule, rank)
    held = tuple(layer for stage in own for layer in layers[stage])
    actions = (scaled(s, own[stage]) for stage in own for s in vars(stages[stage]).values())
    parts = scaled(add(*actions), layout.microbatches)
    parts["bubble"] = time.seconds - time.busy[rank]
    backward = sum(costs.input[stage] + costs.weight[stage] for stage in own)
    # Where two ranks run a stage, one of them updates it: on average each updates half.
    updated = tuple((kind, n * own[stage]) for stage in own for kind, n in layers[stage])
    parts["gradient_reduction"] = _gradients(work, updated, layout, device, backward)
    if layout.num_weight_shards > 1 and layout.gather in ("once", "repeat"):
        # A gather and a scatter, and with "repeat" another gather for the backward.
        gathers = 2 if layout.gather == "repeat" else 1
        parts["fsdp"] = gathers * gather_seconds(held, layout, device)
        parts["fsdp"] += scatter_seconds(held, layout, device)
    parts["optimizer"] = _optimizer(work, updated, layout, device)
    seconds = sum(parts.values())
    flops = flops_per_token(work, layout.sequence)
    tokens = layout.batch * layout.sequence
    return Prediction(
        seconds=seconds,
        parts={kind: parts.get(kind, 0.0) for kind in KINDS},
        tokens_per_second=tokens / seconds,
        model_flops_utilization=flops
        * tokens
        / seconds
        / (layout.devices * hardware.peak_flops("bf16")),
        bubble_fraction=parts["bubble"] / time.seconds,
        forward=costs.forward,
        input=costs.input,
        weight=costs.weight,
        transfer=transfer,
    )


def _with_transfers(stage: ActionSeconds, seconds: float) -> ActionSeconds:
    """Returns the seconds of a stage whose device waits while it receives and sends."""
    waits = {"point_to_point": seconds}
    return ActionSeconds(add(stage.forward, waits), add(stage.input, waits), stage.weight)


def _gradients(
    work: ModelWork, layers: Layers, layout: Layout, device: Device, backward: float
) -> float:
    """Returns the exposed seconds of the gradients' reduction."""
    dense = sum(n * layer.dense_parameters for layer, n in layers) + work.embedding_parameters
    own = layout.num_expert_shards
    dense /= layout.tensor * own
    experts = sum(n * layer.expert_parameters for layer, n in layers)
    experts /= layout.tensor * layout.expert * own
    copies = ("data",) if layout.context_gathers else ("data", "context")
    all_axes = make_group(layout, device, *copies, "expert")
    replicas = make_group(layout, device, *copies)
    # Gradients in float32 are scattered, and weights in bfloat16 gathered; or they are all-reduced.
    itemsize = layout.summed_bytes
    passes = 1 + 2.0 / itemsize if layout.shared_optimizer else 2.0
    seconds = passes * all_gather_seconds(itemsize * dense, all_axes, device)
    seconds += passes * all_gather_seconds(itemsize * experts, replicas, device)
    if not work.head_parameters:  # the first and the last stage sum the gradients of their copies
        shared = 4.0 * work.embedding_parameters / layout.tensor / own
        seconds += send_seconds(shared, layout, device)
    hidden = backward if "gradient_reduction" in layout.overlap else 0.0
    return max(0.0, seconds - hidden)


def _optimizer(work: ModelWork, layers: Layers, layout: Layout, device: Device) -> float:
    parameters = sum(n * device_parameters(layer, layout) for layer, n in layers)
    parameters += work.embedding_parameters / layout.tensor
    shares = layout.num_expert_shards * (layout.data if layout.shared_optimizer else 1)
    return layout.optimizer_bytes * parameters / shares / device.memory_rate


_LEAST = 1e-9  # seconds of an action that a schedule can have
_ROUNDS = 3  # microbatches of a simulation, in multiples of the ranks


@dataclass(frozen=True)
class ScheduleTime:
    """The time of all microbatches."""

    seconds: float  # from the first action to the last
    busy: tuple[float, ...]  # [ranks] seconds that every rank works


def build_schedule(layout: Layout) -> Schedule | None:
    """Returns the schedule of a layout."""
    if isinstance(layout.schedule, Schedule):
        return layout.schedule
    if layout.schedule is None or layout.stage == 1:
        return None
    takes = FAMILIES[layout.schedule].takes if layout.schedule in FAMILIES else ()
    chunks = layout.chunks if "chunks" in takes else None
    return _build(layout.schedule, layout.stage, layout.microbatches, chunks)


@lru_cache(maxsize=64)
def _build(name: str, ranks: int, microbatches: int, chunks: int | None) -> Schedule:
    return build(name, ranks=ranks, microbatches=microbatches, chunks=chunks)


def shorter(layout: Layout) -> tuple[Layout, Layout] | None:
    """Returns two layouts that differ by `stage` microbatches; None if the layout has few."""
    # The time of more follows from theirs: between the warmup and the drain a schedule repeats
    # itself every `stage` microbatches.
    more = _ROUNDS * layout.stage + layout.microbatches % layout.stage
    if layout.schedule is None or layout.stage == 1 or layout.microbatches <= more:
        return None
    few = replace(layout, microbatches=more - layout.stage)
    return few, replace(layout, microbatches=more)


@dataclass(frozen=True)
class StageSeconds:
    """The seconds of the stages for one microbatch."""

    forward: tuple[float, ...]  # [stages, in forward order] seconds of F
    input: tuple[float, ...]  # [stages] seconds of I
    weight: tuple[float, ...]  # [stages] seconds of W
    # Seconds from the end of an action to the start of a dependent one on another rank.
    transfer: float

    def costs(self, schedule: Schedule | None) -> Costs:
        """Returns the costs of actions, each of them of an equal share of the slices, if any."""
        n = 1 if schedule is None else num_slices(schedule)
        rows = self.forward, self.input, self.weight
        forward, of_input, of_weight = (
            tuple(max(x / n, _LEAST) if x else 0.0 for x in row) for row in rows
        )
        return Costs(forward, of_input, of_weight, self.transfer / n)

    def of(
        self, schedule: Schedule | None, num_microbatches: int, *, barrier: bool = True
    ) -> ScheduleTime:
        """Returns the time of a schedule.

        Without `barrier` between steps, a step takes the longest time from a rank's first to its
        last action, as in zero-bubble papers.
        """
        if schedule is None:
            each = sum((*self.forward, *self.input, *self.weight))
            return ScheduleTime(num_microbatches * each, (num_microbatches * each,))
        timeline = simulate(schedule, self.costs(schedule))
        seconds = makespan(timeline)
        if not barrier:
            seconds = max(row[-1].end - row[0].start for row in timeline.rows if row)
        return ScheduleTime(float(seconds), tuple(map(float, busy_times(timeline))))


def _extrapolate(
    first: ScheduleTime, second: ScheduleTime, counted: tuple[Layout, Layout], layout: Layout
) -> ScheduleTime:
    """Returns the time of a layout's microbatches from those of two shorter ones."""
    few, more = (count.microbatches for count in counted)
    rounds = (layout.microbatches - more) / (more - few)

    def beyond(a: float, b: float) -> float:
        return b + rounds * (b - a)

    pairs = zip(first.busy, second.busy, strict=True)
    return ScheduleTime(
        beyond(first.seconds, second.seconds), tuple(beyond(a, b) for a, b in pairs)
    )


def _stage_shares(schedule: Schedule | None, rank: int) -> dict[int, float]:
    """Returns the stages of a rank, and the share of each's microbatches that it runs."""
    if schedule is None:
        return {0: 1.0}
    ranks = _ranks_by_stage(schedule)
    own = Counter(stage for (stage, _), owner in ranks.items() if owner == rank)
    every = Counter(stage for stage, _ in ranks)
    return {stage: own[stage] / every[stage] for stage in sorted(own)}


def num_transfers(schedule: Schedule) -> tuple[int, ...]:
    """Returns the hand-overs that an F, or an I, of every stage receives and sends: 0 to 2."""
    # A device that neither computes beside a transfer nor buffers it waits for each of them. None
    # are between stages of the same rank.
    ranks, last = _ranks_by_stage(schedule), schedule.num_stages - 1
    crossing = {s for (s, m), rank in ranks.items() if s < last and ranks[s + 1, m] != rank}
    crossed = [stage in crossing for stage in range(last)]
    return tuple(before + after for before, after in pairwise([False, *crossed, False]))


def _ranks_by_stage(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Returns the rank of every (stage, microbatch)."""
    return {
        (action.stage, action.microbatch): rank
        for rank, program in enumerate(schedule.programs)
        for step in program
        for action in actions_of(step)
    }
