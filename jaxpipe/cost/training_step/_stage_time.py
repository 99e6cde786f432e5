"""Seconds of the stages of a model for one microbatch: layers, gathers, embedding and head."""

from ..work import LayerWork, ModelWork
from ._layer_time import ActionSeconds, Device, Seconds, add, layer_seconds, product_seconds
from ._layout import Layout
from ._network import all_gather_seconds, make_group

_LOSS_BYTES = 12.0  # of a logit: written, read for its maximum, sum and gradient


def split_layers(work: ModelWork, num_stages: int, layout: Layout) -> list[tuple[LayerWork, ...]]:
    """Returns the kinds of the layers of every stage, in forward order."""
    counts = layout.layers_per_stage or even_layers(work.num_layers, num_stages)
    if len(counts) != num_stages or sum(counts) != work.num_layers:
        raise ValueError(
            f"`layers_per_stage` is {counts}. Give {num_stages} numbers that add up to the "
            f"{work.num_layers} layers of the model."
        )
    kinds, stages, start = work.kinds(), [], 0
    for count in counts:
        stages.append(kinds[start : start + count])
        start += count
    return stages


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Returns layers per stage that differ by at most one."""
    # The last stage has fewer first, as it has the head too, then the first, then those beside
    # them.
    most = -(-num_layers // num_stages)
    outer_first = sorted(
        range(num_stages), key=lambda stage: (min(stage, num_stages - 1 - stage), -stage)
    )
    fewer = set(outer_first[: most * num_stages - num_layers])
    return tuple(most - (stage in fewer) for stage in range(num_stages))


def stage_seconds(
    work: ModelWork, layers: list[tuple[LayerWork, ...]], layout: Layout, device: Device
) -> list[ActionSeconds]:
    """Returns the seconds of every stage for one microbatch, with embedding and head."""
    each = {layer: layer_seconds(layer, layout, device) for layer in work.layers}
    stages = []
    for index, kinds in enumerate(layers):
        boundary = _embedding_and_head(
            work, layout, device, index == 0, index == len(layers) - 1, len(layers)
        )
        times = [*(each[kind] for kind in kinds), boundary]
        gathers = _gathers(kinds, layout, device)
        actions = []
        for name in ("forward", "input", "weight"):
            computing = add(*(getattr(time, name) for time in times))
            actions.append(add(computing, _exposed(gathers, computing, layout)))
        stages.append(ActionSeconds(*actions))
    return stages


def _embedding_and_head(
    work: ModelWork, layout: Layout, device: Device, first: bool, last: bool, num_stages: int
) -> ActionSeconds:
    """Returns the seconds of the embedding on the first stage and of the head on the last."""
    T, t, share = layout.tokens, layout.tensor, 1.0
    seconds = ActionSeconds()
    moved = 4.0 * work.hidden * T / t / device.memory_rate
    if first:
        seconds = ActionSeconds(
            {"head_and_embedding": moved}, {}, {"head_and_embedding": 2 * moved}
        )
    if layout.vocab_parallel:
        share, last = 1.0 / num_stages, True
    if last:
        columns = work.vocab / t * share
        peak = device.hardware.peak_flops("bf16") * device.reached.head
        product = product_seconds(T, work.hidden, columns, peak, device.hardware, device.reached)
        loss = _LOSS_BYTES * T * columns / device.memory_rate
        forward = {"head_and_embedding": product + loss}
        back = {"head_and_embedding": product + loss / 2}
        seconds = ActionSeconds(
            add(seconds.forward, forward),
            add(seconds.input, back),
            add(seconds.weight, {"head_and_embedding": product}),
        )
    return seconds


def _gathers(layers: tuple[LayerWork, ...], layout: Layout, device: Device) -> float:
    """Returns the seconds of one gather of a stage's weights, or one scatter of its gradients."""
    if layout.num_weight_shards == 1 or layout.gather in ("once", "repeat"):
        return 0.0
    return gather_seconds(layers, layout, device)


def gather_seconds(layers: tuple[LayerWork, ...], layout: Layout, device: Device) -> float:
    """Returns the seconds of one gather of layers' weights over `fsdp`."""
    group = make_group(layout, device.network, "fsdp")
    if not layout.experts_gather:
        return all_gather_seconds(
            sum(layer.weight_bytes * device_parameters(layer, layout) for layer in layers),
            group,
            device.network,
        )
    every = make_group(layout, device.network, "fsdp", "expert")
    dense = sum(layer.weight_bytes * layer.dense_parameters / layout.tensor for layer in layers)
    experts = sum(layer.weight_bytes * expert_parameters(layer, layout) for layer in layers)
    seconds = all_gather_seconds(dense, every, device.network)
    return seconds + all_gather_seconds(experts, group, device.network)


def device_parameters(layer: LayerWork, layout: Layout) -> float:
    """Returns the weights of a layer on a device, before `fsdp` divides them."""
    return layer.dense_parameters / layout.tensor + expert_parameters(layer, layout)


def expert_parameters(layer: LayerWork, layout: Layout) -> float:
    """Returns the weights of a layer's experts on a device, before `fsdp` divides them."""
    return layer.expert_parameters / (layout.expert * layout.tensor)


def _exposed(gathers: float, beside: Seconds, layout: Layout) -> Seconds:
    """Returns the seconds of gathers that computation does not hide."""
    if not gathers:
        return {}
    if "fsdp" not in layout.overlap:
        return {"fsdp": gathers}
    return {"fsdp": max(0.0, gathers - sum(beside.values()))}
