"""The prediction of a step: stages, schedule, gradients and optimizer together."""

from dataclasses import dataclass

from ...devices import Hardware
from ...schedules import Schedule
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
from ._schedule_time import (
    StageSeconds,
    build_schedule,
    extrapolate,
    num_transfers,
    shorter,
    stage_shares,
)

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
        time = extrapolate(time, costs.of(build_schedule(fewer[1]), 0), fewer, layout)
    rank = max(range(len(time.busy)), key=time.busy.__getitem__)
    own = stage_shares(schedule, rank)
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
