"""Seconds of one layer for one microbatch, by kind of work, for F, I and W.

T tokens of a microbatch on a device.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil

from ...devices import Hardware
from ..work import LayerWork, Product
from ..work._layer_work import attention_flops
from ._efficiency import Efficiency
from ._layout import Layout
from ._network import Group, Network, all_gather_seconds, all_to_all_seconds, make_group

Seconds = dict[str, float]
"""Seconds by kind of work: the names of `Prediction.parts`."""

_BACKWARD_ATTENTION = 2.5  # with the scores computed again: 5 products for 2
_BACKWARD_ELEMENTWISE = 1.5
_TILE = 128  # rows and columns of the tiles that matrix units compute

Size = int | float


@dataclass(frozen=True)
class ActionSeconds:
    """Seconds of F, I and W of one layer or stage and one microbatch, by kind of work."""

    forward: Seconds = field(default_factory=dict)
    input: Seconds = field(default_factory=dict)
    weight: Seconds = field(default_factory=dict)


@dataclass(frozen=True)
class Device:
    """A kind of device, and what it and its network reach in a layout."""

    hardware: Hardware
    reached: Efficiency
    network: Network

    @property
    def memory_rate(self) -> float:
        """Bytes a second of elementwise operations."""
        return self.hardware.memory_bandwidth * self.reached.memory


def add(*terms: Seconds) -> Seconds:
    """Returns the sum of seconds, kind by kind."""
    total: Seconds = {}
    for term in terms:
        for kind, seconds in term.items():
            total[kind] = total.get(kind, 0.0) + seconds
    return total


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
    kernels = layer.num_kernels * device.reached.kernel_seconds
    other = moved + kernels
    communication = _communication(layer, layout, device)
    forward = {
        "products": products + attention,
        "other_compute": other + moved_scores,
        **communication,
    }
    again = {}
    if layout.recomputed is not None:
        again = {kind: seconds * layout.recomputed for kind, seconds in forward.items()}
    elif layout.remat == "full":
        again = forward
    elif layout.remat == "selective" and not _fused(layer):
        again = {"products": attention, "other_compute": moved_scores}
    backward_attention = _BACKWARD_ATTENTION if _fused(layer) else 2.0
    back = {
        "products": products + backward_attention * attention,
        "other_compute": _BACKWARD_ELEMENTWISE * moved + kernels + 2 * moved_scores,
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


def _fused(layer: LayerWork) -> bool:
    return layer.attention is None or layer.attention.fused


def _products(layer: LayerWork, layout: Layout, device: Device) -> Iterator[float]:
    for product in layer.products:
        count, tokens, k, n = _on_one_device(product, layer, layout)
        peak = device.hardware.peak_flops(layout.dtype) * device.reached.products
        peak *= device.reached.experts if product.split == "expert" else 1.0
        yield count * product_seconds(tokens, k, n, peak, device.hardware, device.reached)


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
    seconds = flops / (peak * device.reached.attention)
    if attention.fused:
        return seconds, 0.0
    # Scores, mask, softmax, dropout and the product: some 10 bytes read or written for each.
    scores = attention.heads * positions * layout.tokens / layout.tensor
    return seconds, 10.0 * scores / device.memory_rate


def _communication(layer: LayerWork, layout: Layout, device: Device) -> Seconds:
    """Returns the exposed seconds of a layer's collectives in one direction."""
    by_kind: Seconds = {}
    sent = layer.boundary_bytes * layout.tokens
    if layout.tensor > 1:
        group = make_group(layout, device.network, "tensor")
        pairs = 1 if layer.num_experts and layout.experts_over_tensor else 2
        each = 2 * all_gather_seconds(sent, group, device.network)
        hidden = _HIDDEN if "tensor" in layout.overlap else 0.0
        by_kind["tensor"] = pairs * each * (1 - hidden)
    if layer.num_experts and (layout.expert > 1 or layout.experts_over_tensor):
        axes = ("expert", "tensor") if layout.experts_over_tensor else ("expert",)
        group = make_group(layout, device.network, *axes)
        own = layout.tokens / layout.tensor
        chosen = layer.active_experts
        hidden = _HIDDEN if "experts" in layout.overlap else 0.0
        if layout.experts_gather:
            all_tokens = layout.tokens * layout.expert * layer.expert_boundary_bytes
            gathered = 2 * all_gather_seconds(all_tokens, group, device.network)
            return by_kind | {"experts": gathered * (1 - hidden)}
        exchanged = 2 * all_to_all_seconds(
            own * chosen * layer.expert_boundary_bytes,
            group,
            device.network,
            _domains(chosen, group) / chosen if layout.deduplicate_experts else 1.0,
        )
        by_kind["experts"] = exchanged * (1 - hidden)
    if layout.context > 1 and layer.attention is not None:
        group = make_group(layout, device.network, "context")
        keys = 2.0 * layer.attention.kv_channels * layout.tokens * layout.context / layout.tensor
        seconds = all_gather_seconds(keys, group, device.network)
        hidden = _HIDDEN if "context" in layout.overlap else 0.0
        by_kind["context"] = seconds * (1 - hidden)
    return by_kind


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


_HIDDEN = 0.7  # of a collective that runs beside products which depend on its parts


def product_seconds(
    m: Size, k: Size, n: Size, peak_flops: float, hardware: Hardware, reached: Efficiency
) -> float:
    """Returns the seconds of a product of [m, k] by [k, n]: a roofline, and then the writing."""
    # The result is written after it is computed, which makes products with a short contracted dim
    # inefficient.
    operations = 2.0 * _padded(m) * k * _padded(n) / peak_flops
    memory_rate = hardware.memory_bandwidth * reached.memory
    return max(operations, 2.0 * (m * k + k * n) / memory_rate) + 2.0 * m * n / memory_rate


def _padded(size: Size) -> int:
    return ceil(size / _TILE) * _TILE
