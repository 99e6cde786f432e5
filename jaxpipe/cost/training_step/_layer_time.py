"""Seconds of layers and stages for one microbatch, by kind of work, for F, I and W.

T tokens of a microbatch on a device.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import ceil

from ...devices import cudnn_attention
from ..work import LayerWork, ModelWork, Product
from ..work._work import Attention, attention_flops
from ._layout import Layout
from ._network import Device, Group, all_gather_seconds, all_to_all_seconds, make_group

Seconds = dict[str, float]
"""Seconds by kind of work: the names of `Prediction.parts`."""

_BACKWARD_ELEMENTWISE = 1.5
_TILE = 128  # rows and columns of the tiles that matrix units compute
_LOSS_BYTES = 12.0  # of a logit: written, read for its maximum, sum and gradient
_HIDDEN = 0.7  # of a collective that runs beside products which depend on its parts

Size = int | float

Layers = tuple[tuple[LayerWork, Size], ...]
"""The layers of a stage in forward order: runs of one kind, each as (kind, number of layers)."""


@dataclass(frozen=True)
class ActionSeconds:
    """Seconds of F, I and W of one layer or stage and one microbatch, by kind of work."""

    forward: Seconds = field(default_factory=dict)
    input: Seconds = field(default_factory=dict)
    weight: Seconds = field(default_factory=dict)


def add(*terms: Seconds) -> Seconds:
    """Returns the sum of seconds, kind by kind."""
    total: Seconds = {}
    for term in terms:
        for kind, seconds in term.items():
            total[kind] = total.get(kind, 0.0) + seconds
    return total


def scaled(seconds: Seconds, factor: Size) -> Seconds:
    """Returns the product of seconds and a factor, kind by kind."""
    return {kind: factor * x for kind, x in seconds.items()}


def layer_seconds(layer: LayerWork, layout: Layout, device: Device) -> ActionSeconds:
    """Returns the seconds of a layer for one microbatch, without gathers of its weights."""
    products = sum(_products(layer, layout, device))
    attention, moved_scores = _attention(layer, layout, device)
    divided = layout.tensor if layout.sequence_parallel else 1
    bytes_moved = layer.elementwise_bytes / layout.tensor + layer.between_bytes / divided
    if layout.experts_gather:
        # Rows of all devices along `expert`, of whole tokens, not those of a device.
        whole = layer.row_bytes + layer.inner_row_bytes / layout.tensor
        own = (layer.row_bytes + layer.inner_row_bytes) / layout.tensor
        bytes_moved += layout.expert * whole - own
    moved = bytes_moved * layout.tokens + _cast_bytes(layer, layout)
    moved /= device.memory_rate
    moved_back = _BACKWARD_ELEMENTWISE * moved
    if layer.backward_elementwise_bytes is not None:
        own = layer.backward_elementwise_bytes / layout.tensor
        moved_back = own * layout.tokens / device.memory_rate
    kernels = layer.num_kernels * device.reached.kernel_seconds
    other = moved + kernels
    communication = _communication(layer, layout, device)
    forward = {
        "products": products + attention,
        "other_compute": other,
        "attention_scores": moved_scores,
        **communication,
    }
    again = {}
    if layout.recomputed is not None:
        again = scaled(forward, layout.recomputed)
        if layout.recomputed_attention is not None:
            again["products"] = (
                products * layout.recomputed + attention * layout.recomputed_attention
            )
    elif layout.remat == "full":
        again = forward
    elif layout.remat == "selective" and layer.attention and not layer.attention.fused:
        again = {"products": attention, "attention_scores": moved_scores}
    # A forward has two products of attention.
    products_back = 4
    if layer.attention and layer.attention.fused:
        products_back = layer.attention.backward_products
    back = {
        "products": products + products_back / 2 * attention,
        "other_compute": moved_back + kernels,
        "attention_scores": 2 * moved_scores,
        **communication,
    }
    if "tensor" in back:
        back["tensor"] = _backward_tensor(back["tensor"], layout)
    return ActionSeconds(forward, add(back, again), {"products": products})


def _cast_bytes(layer: LayerWork, layout: Layout) -> float:
    """Returns the bytes of casting what products read: from 2 bytes to 1, also transposed."""
    if layout.dtype == "bf16":
        return 0.0
    sizes = (_on_one_device(product, layer, layout) for product in layer.products)
    return sum(4.0 * count * tokens * k for count, tokens, k, _ in sizes)


def _products(layer: LayerWork, layout: Layout, device: Device) -> Iterator[float]:
    dense = device.hardware.peak_flops(layout.dtype) * device.reached.products
    for product in layer.products:
        count, tokens, k, n = _on_one_device(product, layer, layout)
        peak = dense * (device.reached.experts if product.split == "expert" else 1.0)
        if product.taps > 1 and device.hardware.torus_axes:
            # A depthwise convolution takes as long as one with a tile of channels in each group.
            k = product.taps * _padded(k / product.taps)
        yield count * _product_seconds(tokens, k, n, peak, device)


def _on_one_device(
    product: Product, layer: LayerWork, layout: Layout
) -> tuple[Size, Size, Size, Size]:
    """Returns the number of products that a device computes, and their sizes."""
    t, T = layout.tensor, layout.tokens
    if product.split == "expert":
        over = layout.expert * (t if layout.experts_over_tensor else 1)
        local = max(1.0, layer.num_experts / over)
        own = T / t if layout.experts_over_tensor else T
        n = product.n if layout.experts_over_tensor else product.n / t
        return local, own * product.copies / local, product.k, n
    if product.split == "column":
        return 1.0, T * product.copies, product.k, product.n / t
    if product.split == "row":
        return 1.0, T * product.copies, product.k / t, product.n
    return 1.0, T * product.copies / t, product.k, product.n


def _attention(layer: LayerWork, layout: Layout, device: Device) -> tuple[float, float]:
    """Returns the seconds of the products of attention, and of moving its scores."""
    attention = layer.attention
    if attention is None:
        return 0.0, 0.0
    whole = attention.whole_square
    positions = layout.sequence if whole else attention.positions(layout.sequence)
    flops = attention_flops(attention, positions) * layout.tokens / layout.tensor
    peak = device.hardware.peak_flops("bf16")
    reached = device.reached.attention
    if attention.fused and device.reached.attention_by_heads and attention.qk_channels <= 256:
        reached = cudnn_attention(attention.qk_channels)
    seconds = flops / (peak * reached)
    if attention.fused:
        return seconds, 0.0
    scores = attention.heads * positions * layout.tokens / layout.tensor
    return seconds, attention.score_bytes * scores / device.memory_rate


def _communication(layer: LayerWork, layout: Layout, device: Device) -> Seconds:
    """Returns the exposed seconds of a layer's collectives in one direction."""
    by_kind: Seconds = {}
    sent = layer.boundary_bytes * layout.tokens
    if layout.tensor > 1:
        group = make_group(layout, device, "tensor")
        shares_experts = layer.num_experts and layout.experts_over_tensor
        pairs = 1 if shares_experts else layer.tensor_sums
        each = 2 * all_gather_seconds(sent, group, device)
        hidden = _HIDDEN if "tensor" in layout.overlap else 0.0
        by_kind["tensor"] = pairs * each * (1 - hidden)
    if layer.num_experts and (layout.expert > 1 or layout.experts_over_tensor):
        axes = ("expert", "tensor") if layout.experts_over_tensor else ("expert",)
        group = make_group(layout, device, *axes)
        own = layout.tokens / layout.tensor
        chosen = layer.active_experts
        hidden = _HIDDEN if "experts" in layout.overlap else 0.0
        if layout.experts_gather:
            all_tokens = layout.tokens * layout.expert * layer.expert_boundary_bytes
            gathered = 2 * all_gather_seconds(all_tokens, group, device)
            return by_kind | {"experts": gathered * (1 - hidden)}
        exchanged = 2 * all_to_all_seconds(
            own * chosen * layer.expert_boundary_bytes,
            group,
            device,
            _domains(chosen, group) / chosen if layout.deduplicate_experts else 1.0,
        )
        by_kind["experts"] = exchanged * (1 - hidden)
    if layout.context > 1 and layer.attention is not None:
        seconds = _context_seconds(layer.attention, layout, device)
        hidden = _HIDDEN if "context" in layout.overlap else 0.0
        by_kind["context"] = seconds * (1 - hidden)
    return by_kind


def _context_seconds(attention: Attention, layout: Layout, device: Device) -> float:
    """Returns the seconds in which keys and values are gathered over `context`."""
    group = make_group(layout, device, "context")
    keys = 2.0 * attention.kv_channels * layout.tokens * layout.context / layout.tensor
    seconds = all_gather_seconds(keys, group, device)
    exchanging = 1 - attention.windowed if attention.window else 1.0
    if layout.context_gathers and exchanging:
        # Half of the queries, and then of what they read, is exchanged within pairs of devices.
        channels = exchanging * attention.heads * (attention.qk_channels + attention.v_channels)
        pair = Group(2, min(2, group.linked))
        moved = 2.0 * channels * layout.tokens / layout.tensor
        seconds += all_to_all_seconds(moved, pair, device)
    return seconds


def _backward_tensor(forward: float, layout: Layout) -> float:
    """Returns the exposed seconds in a backward: the products of W run beside it."""
    # With sequence parallelism W has to gather its input again.
    volume = 1.5 if layout.sequence_parallel else 1.0
    hidden = 0.0 if "tensor" in layout.overlap else _HIDDEN
    return volume * forward * (1 - hidden)


def _domains(chosen: int, group: Group) -> float:
    """Returns in how many domains of links a token's experts are, if it chooses any of all."""
    domains = group.size / group.linked
    return domains * (1 - (1 - 1 / domains) ** chosen)


def _product_seconds(m: Size, k: Size, n: Size, peak_flops: float, device: Device) -> float:
    """Returns the seconds of a product of [m, k] by [k, n]: a roofline, and then the writing."""
    # The result is written after it is computed, or a share of it, which makes products with a
    # short contracted dim inefficient.
    operations = 2.0 * _padded(m) * k * _padded(n) / peak_flops
    read, written = 2.0 * (m * k + k * n) / device.memory_rate, 2.0 * m * n / device.memory_rate
    return max(operations, read) + device.reached.writing * written


def _padded(size: Size) -> int:
    return ceil(size / _TILE) * _TILE


def split_layers(work: ModelWork, num_stages: int, layout: Layout) -> list[Layers]:
    """Returns the layers of every stage, in forward order."""
    counts = layout.layers_per_stage or even_layers(work.num_layers, num_stages)
    if len(counts) != num_stages or sum(counts) != work.num_layers:
        raise ValueError(
            f"`layers_per_stage` is {counts}. Give {num_stages} numbers that add up to the "
            f"{work.num_layers} layers of the model."
        )
    remaining, stages = deque((layer, layer.count) for layer in work.layers), []
    for count in counts:
        runs = []
        while count:
            layer, available = remaining.popleft()
            taken = min(count, available)
            if taken:
                runs.append((layer, taken))
            if taken < available:
                remaining.appendleft((layer, available - taken))
            count -= taken
        stages.append(tuple(runs))
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
    work: ModelWork, layers: list[Layers], layout: Layout, device: Device
) -> list[ActionSeconds]:
    """Returns the seconds of every stage for one microbatch, with embedding and head."""
    # By identity: to hash a `LayerWork` for every layer took a tenth of a search for plans.
    each = {id(layer): layer_seconds(layer, layout, device) for layer in work.layers}
    stages = []
    for index, kinds in enumerate(layers):
        boundary = _embedding_and_head(
            work, layout, device, index == 0, index == len(layers) - 1, len(layers)
        )
        gathers, scatters = _gathers(kinds, layout, device)
        transfers = {"forward": gathers, "input": gathers, "weight": scatters}
        actions = []
        for name, seconds in transfers.items():
            of_layers = (scaled(getattr(each[id(kind)], name), count) for kind, count in kinds)
            computing = add(*of_layers, getattr(boundary, name))
            actions.append(add(computing, _exposed(seconds, computing, layout)))
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
        product = _product_seconds(T, work.hidden, columns, peak, device)
        loss = _LOSS_BYTES * T * columns / device.memory_rate
        forward = {"head_and_embedding": product + loss}
        back = {"head_and_embedding": product + loss / 2}
        seconds = ActionSeconds(
            add(seconds.forward, forward),
            add(seconds.input, back),
            add(seconds.weight, {"head_and_embedding": product}),
        )
    return seconds


def _gathers(layers: Layers, layout: Layout, device: Device) -> tuple[float, float]:
    """Returns the seconds of one gather of a stage's weights, and of one scatter of gradients."""
    if layout.num_weight_shards == 1 or layout.gather in ("once", "repeat"):
        return 0.0, 0.0
    return gather_seconds(layers, layout, device), scatter_seconds(layers, layout, device)


def scatter_seconds(layers: Layers, layout: Layout, device: Device) -> float:
    """Returns the seconds of one scatter of layers' gradients, which sends what a gather does."""
    return gather_seconds(layers, layout, device, layout.scattered_bytes)


def gather_seconds(
    layers: Layers, layout: Layout, device: Device, itemsize: float | None = None
) -> float:
    """Returns the seconds of one gather of layers' weights over the axes that divide them.

    A weight has `itemsize` bytes. None: its own.
    """
    counts = [(la, n * (la.weight_bytes if itemsize is None else itemsize)) for la, n in layers]
    group = make_group(layout, device, *layout.weight_axes)
    seconds = partial(all_gather_seconds, device=device, in_one_ring=layout.gathers_in_one_ring)
    if not layout.experts_gather:
        read = (n * device_parameters(layer, layout) for layer, n in counts)
        return seconds(sum(read, 0.0), group)
    every = make_group(layout, device, *layout.weight_axes, "expert")
    dense = sum((n * la.dense_parameters / layout.tensor for la, n in counts), 0.0)
    experts = sum((n * expert_parameters(la, layout) for la, n in counts), 0.0)
    return seconds(dense, every) + seconds(experts, group)


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
