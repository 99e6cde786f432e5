"""Seconds of a step that are no work of the model: what engines do beside it, as XLA compiles it.

S ranks, v stages on each, M microbatches.
"""

import jax.numpy as jnp

from ...cost.training_step import efficiency
from ...xla.compiler_flags import ADDS_IN_PRODUCTS, LARGE_VMEM
from .._candidates import StepLayout, splits_backward
from .._devices import device_hardware
from .._model import OFFLOAD_INPUTS, gathered_parameters, stored_parameters
from .._request import Request
from ..memory import step_sizes

_STACKED_SUM_BYTES, _SUM_BYTES = 30.0, 14.0
"""Bytes that XLA:TPU reads and writes to add a gradient to its sum: it converts 2 bytes to 4,
copies the sum out of a stack of layers, adds, and copies it back. A sum of its own is not copied,
and takes 14 bytes by the cycles of llama2-7b on v5p."""

_STACKED_SUM_SAVED, _SUM_SAVED = 18.0, 13.0
"""Bytes of these that are not moved where a product adds to its sum, by the cycles of the same
rows. The sum is still copied out of its stack."""

_STACK_BYTES = 8.0
"""Bytes that XLA reads and writes for each byte that a layer keeps: loops over layers write it to a
stack, or to a buffer of the engine, and read it there. As XLA:TPU compiles it; what a step took on
an H200 that kept 12 GB more says the same (docs/benchmarks.md, "1B, minimal_with_context")."""

_OWN_STACK_BYTES = 4.0
"""The same of layers of own models, of which nothing but what they keep is counted as kept."""

_COPY_BYTES_MOVED = 5.5
"""Bytes that XLA:TPU reads and writes to bring a byte of gathered experts into tiles, by the cycles
of deepseek3-671b on v5p:8x8x8 (libtpu 0.0.48.1): 9.7 s of circular, 3.2 s of FSDP."""

_WINDOW_BYTES = 20.0
"""Bytes of a weight that are read and written when a rank begins its stage: a copy of 2 bytes for
the forward and for the backward, and of its sum 4 bytes of zeros and a copy."""

_PRODUCT_PASSES = 1.5
"""Extra passes over a product's result, for each shard of its weight, that reproduce how much
slower products are in programs of XLA:TPU without jaxpipe's flags."""

_FEW_SHARDS, _MOST_SHARDS = 4, 32
"""The largest `fsdp` for which products take no longer, and the largest that was compiled."""


def engine_seconds(candidate: StepLayout, request: Request, flags: frozenset[str]) -> float:
    """Returns the seconds of what engines and compilers do beside the model's own work.

    `flags` are the names of the compiler's flags that have an effect.
    """
    adds = LARGE_VMEM in flags and device_hardware(request.devices).kind in ADDS_IN_PRODUCTS
    seconds = gradient_sum_seconds(candidate, request, in_products=adds)
    seconds += _store_seconds(candidate, request) + _copy_seconds(candidate, request)
    seconds += _window_seconds(candidate, request)
    if candidate.engine.pipelines:
        return seconds
    return seconds + _slow_product_seconds(candidate, request)


def _memory_rate(request: Request) -> float:
    """Returns the bytes a second that a device reads and writes."""
    kind = device_hardware(request.devices)
    return kind.memory_bandwidth * efficiency(kind, "bf16").memory


def _store_seconds(candidate: StepLayout, request: Request) -> float:
    """Returns the seconds in which what layers keep is written to a stack, and read there."""
    if candidate.policy == OFFLOAD_INPUTS:  # what goes to the host is written and read, too
        candidate = candidate._replace(policy="full")
    sizes = step_sizes(request.model, candidate, request.tokens(candidate))
    kept = sizes.residuals + (sizes.wgrad_residuals if splits_backward(candidate) else 0.0)
    passes = _OWN_STACK_BYTES if request.source.is_own else _STACK_BYTES
    visits = candidate.microbatches * candidate.chunks
    return visits * passes * kept / _memory_rate(request)


def _window_seconds(candidate: StepLayout, request: Request) -> float:
    """Returns the seconds in which a rank changes the windows of weights of its stages."""
    if candidate.gather != "repeat" or not candidate.gathers:
        return 0.0
    layers = candidate.layers_per_stage * candidate.chunks
    parameters = layers * gathered_parameters(request.model.layer, candidate.sizes)
    return _WINDOW_BYTES * parameters / _memory_rate(request)


def _copy_seconds(candidate: StepLayout, request: Request) -> float:
    """Returns the seconds in which gathered slices of experts are put together.

    Pipelines do so with gradients too, before they are scattered.
    """
    if candidate.whole_experts or not candidate.cuts_tiles:
        return 0.0
    model, engine = request.model, candidate.engine
    size = model.of_layers.read * gathered_parameters(model.experts, candidate.sizes)
    gathers_again = not engine.pipelines or candidate.gather in ("tick", "layer")
    visits = candidate.layers_per_stage * candidate.chunks
    visits *= candidate.microbatches if gathers_again else 1
    passes = 3 if engine.pipelines else 2
    return visits * passes * _COPY_BYTES_MOVED * size / _memory_rate(request)


def expert_reduction_seconds(
    candidate: StepLayout, request: Request, *, hides_scatters: bool
) -> float:
    """Returns the seconds that sums of experts' gradients over `fsdp` take beyond a scatter.

    XLA:TPU adds them up whole on every device, and takes a part of that, without a pipeline: it
    sends twice the bytes of a scatter. Nothing runs beside it, also where scatters are hidden.
    """
    kind, size = device_hardware(request.devices), candidate.sizes["fsdp"]
    experts = request.model.experts
    if not kind.torus_axes or candidate.engine.pipelines or not experts or size == 1:
        return 0.0
    sent = request.model.of_layers.read * gathered_parameters(experts, candidate.sizes)
    bandwidth = kind.link_bandwidth * efficiency(kind, "bf16").links / (2 if size == 2 else 1)
    visits = candidate.microbatches * request.model.num_layers
    return (1 + hides_scatters) * visits * (size - 1) / size * sent / bandwidth


def tick_scatter_seconds(candidate: StepLayout, request: Request) -> float:
    """Returns the seconds in which pipelines of TPUs scatter experts' gradients in their ticks.

    They do so at its end, when the layers' work is done: no product is left to hide it. In every
    tick they scatter all of a stage, or of a stage that is left a part.
    """
    kind, size = device_hardware(request.devices), candidate.sizes["fsdp"]
    experts, engine = request.model.experts, candidate.engine
    if not kind.torus_axes or not experts or size == 1:
        return 0.0
    if not engine.pipelines or engine.program_per_rank or candidate.gather == "once":
        return 0.0
    count = gathered_parameters(experts, candidate.sizes) * (size - 1) / size
    visits = candidate.layers_per_stage * candidate.chunks
    visits *= 1 if candidate.gather == "repeat" else candidate.microbatches
    # At the rate of XLA:TPU's estimates, by which the programs were played that this was found in.
    bandwidth = kind.link_bandwidth / (2 if size == 2 else 1)
    return visits * reduced_bytes(candidate) * count / bandwidth


def reduced_bytes(candidate: StepLayout) -> float:
    """Returns the bytes of a gradient of a layer that a pipeline sums over devices."""
    return float(jnp.dtype(candidate.options.reduce_dtype or jnp.float32).itemsize)


def _slow_product_seconds(candidate: StepLayout, request: Request) -> float:
    """Returns the seconds by which products of gathered weights are slower without flags.

    Fitted to three programs of llama3.1-70b. Published steps of FSDP on up to 512 chips, which have
    such flags, show none of it.
    """
    shards = min(candidate.sizes["fsdp"], _MOST_SHARDS)
    torus = device_hardware(request.devices).torus_axes
    if not torus or request.default_flags != "none":
        return 0.0
    if shards <= _FEW_SHARDS or candidate.sizes["expert"] > 1:
        return 0.0
    hidden, columns = request.work.hidden, 0.0
    for layer in request.work.layers:
        for product in layer.products:
            if product.split != "expert" and hidden in (product.k, product.n):
                other = product.n if product.k == hidden else product.k
                columns += layer.count * other * product.copies / candidate.sizes["tensor"]
    size = request.model.activation_bytes * columns * request.tokens(candidate)
    return candidate.microbatches * shards * _PRODUCT_PASSES * size / _memory_rate(request)


def data_reduction_seconds(candidate: StepLayout, request: Request) -> float:
    """Returns the seconds in which gradients are added over `data` while nothing else runs.

    Without a pipeline every layer does so for every microbatch, in the dtype of its products.
    Pipelines add up what a device has, and do so once.
    """
    kind, size = device_hardware(request.devices), candidate.sizes["data"]
    if not kind.torus_axes or size == 1:
        return 0.0
    times, itemsize = 1, min(request.model.of_layers.gradient, reduced_bytes(candidate))
    if not candidate.engine.pipelines:
        times = candidate.microbatches
        itemsize = min(itemsize, request.work.layers[-1].weight_bytes)
    layers = candidate.layers_per_stage * candidate.chunks
    parameters = layers * stored_parameters(request.model.layer, candidate.sizes)
    slices = request.devices.num_slices if candidate.across == "data" else 1
    inside = size // slices
    sent = 2 * (inside - 1) / inside * itemsize * parameters
    bandwidth = kind.link_bandwidth / (2 if inside == 2 else 1)  # two devices have one way round
    seconds = sent / bandwidth
    if slices > 1:  # each device sends its share of the sums of a slice to the other slices
        sent = 2 * (slices - 1) / slices * itemsize * parameters / inside
        seconds += sent / (kind.network_bandwidth * efficiency(kind, "bf16").network)
    return times * seconds


def exposed_host_seconds(
    candidate: StepLayout, request: Request, work: float, moves: float | None = None
) -> float:
    """Returns the seconds in which a device waits for inputs of layers on the host.

    They are sent and come back beside `work`, the seconds in which layers compute, but for GPUs: on
    an H200 nothing of it was hidden (docs/benchmarks.md, "1B, minimal_offloaded"). `moves` is how
    often a schedule moves them one way; None: the least.
    """
    hidden = 0.0 if device_hardware(request.devices).is_gpu else work
    return max(0.0, _host_seconds(candidate, request, moves) - hidden)


def _host_seconds(candidate: StepLayout, request: Request, moves: float | None) -> float:
    if candidate.policy != OFFLOAD_INPUTS:
        return 0.0
    visits, times = candidate.microbatches * candidate.chunks, 2
    if candidate.engine.runs_schedules:  # which moves in every tick, and for a W once more
        visits = moves or visits + 2 * (candidate.num_ranks - 1)
        times += splits_backward(candidate)
    size = request.model.input_bytes(request.tokens(candidate), candidate.sizes)
    moved = times * visits * candidate.layers_per_stage * size
    return moved / device_hardware(request.devices).host_bandwidth


def gradient_sum_seconds(candidate: StepLayout, request: Request, *, in_products: bool) -> float:
    """Returns the seconds of a call in which gradients of microbatches are added up on a rank.

    With `in_products` XLA adds a product to its sum in one operation if the sum is of whole
    weights; gradients that are scattered first are added afterwards.
    """
    if candidate.microbatches * candidate.accumulation == 1:
        return 0.0
    # Without a pipeline sums are those of the parameters that a device stores.
    count = gathered_parameters if candidate.engine.pipelines else stored_parameters
    layers = candidate.layers_per_stage * candidate.chunks
    is_alone = candidate.engine.stage_by_stage and candidate.layers_per_stage == 1
    is_whole = not candidate.gathers or (
        candidate.engine.pipelines and candidate.gather in ("once", "repeat")
    )
    each, saved = _SUM_BYTES, _SUM_SAVED
    if not is_alone:
        each, saved = _STACKED_SUM_BYTES, _STACKED_SUM_SAVED
    moved = each * count(request.model.layer, candidate.sizes)
    if in_products and is_whole:  # kernels of experts do not add
        moved -= saved * count(request.model.dense, candidate.sizes)
    return candidate.microbatches * layers * moved / _memory_rate(request)
