"""The memory of a device during a step, by kind, by arithmetic.

Peaks are those of the engines' own buffers: what a loop over ticks carries, and what the largest
of its phases makes beside that. Figures that are the compiler's are named as constants, and
docs/plan.md compares the sums with compiled programs. S ranks, v stages on each, M microbatches, t
tokens of a microbatch on a device.
"""

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

from ._candidates import Live, StepLayout
from ._model import (
    PlannedModel,
    WeightBytes,
    gathered_parameters,
    largest_weight,
    mesh_sizes,
    stored_parameters,
    token_bytes,
)

_FLOAT32 = 4
_MOMENTS = 2

_LIVE = 0.8
"""What of the tensors of a layer exists at a time while its backward runs."""

_LIVE_ON_CPU = 1.15
"""The same of XLA:CPU, which fuses less, and computes in float32 whatever the dtype is."""

_EXPANDED = 3.1
"""Arrays of every row for every expert that XLA:GPU holds at a time: its `ragged_dot` is a product
over all experts, of rows that are zero but for one. Where tokens run in chunks it holds less."""

_FOR_WEIGHTS = 1.0
"""The inputs and the cotangents of a layer's products, as a share of all its tensors."""

_STREAM = 4
"""Copies of a rank's microbatches that the circular engine holds: inputs, stream, results and
their cotangents."""

_LOGITS = 1.25
"""Float32 arrays as large as the logits. These and their cotangents are in part bfloat16, and in
part never stored."""


@dataclass(frozen=True)
class PeakMemory:
    """Bytes on a device at the peak of a step, by kind.

    Attributes:
        weights: Weights as they are stored between steps.
        optimizer: The optimizer's state.
        gradients: Gradients of all weights, summed over microbatches.
        gathered: Weights as layers read them, and casts of them.
        activations: What forwards keep for backwards, and microbatches between ranks.
        logits: Logits and their cotangents, if the peak is in the loss.
        buffers: What a layer computes with, and what engines and compilers hold beside these.
    """

    weights: float
    optimizer: float
    gradients: float
    gathered: float
    activations: float
    logits: float
    buffers: float

    @property
    def total(self) -> float:
        """Returns the sum."""
        return sum(getattr(self, kind.name) for kind in fields(self))

    @property
    def largest(self) -> str:
        """Returns the kind that needs most."""
        return max((kind.name for kind in fields(self)), key=lambda name: getattr(self, name))


def memory(model: PlannedModel, candidate: StepLayout, tokens: float, live: Live) -> PeakMemory:
    """Returns the memory of a device.

    Args:
        model: The model.
        candidate: The layout.
        tokens: t.
        live: How many microbatches a rank stores at a time, for engines that run schedules.

    Returns:
        The bytes by kind.
    """
    match candidate.engine:
        case "none":
            return _unpipelined(model, candidate, tokens)
        case "circular":
            return _circular(model, candidate, tokens)
        case _:
            return _scheduled(model, candidate, tokens, live)


class _Parts(NamedTuple):
    """What all engines have, in bytes.

    `stored` and `whole` are parameters of the layers of a rank, as stored and as read, `boundary`
    and `whole_boundary` those before and after the pipeline, `layer` those of one layer as read.
    """

    stored: float
    whole: float
    layer: float
    boundary: float
    whole_boundary: float
    activation: float
    kept: float
    passed_on: float
    layer_work: float
    for_weights: float
    loss: float
    largest: float
    of_layers: WeightBytes
    of_boundary: WeightBytes

    @property
    def cast(self) -> float:
        """Returns the bytes of casts of all weights of a rank, as they are stored."""
        return self.of_layers.cast * self.stored + self.of_boundary.cast * self.boundary

    @property
    def stored_grads(self) -> float:
        """Returns the bytes of sums of gradients of all weights, as these are stored."""
        return self.of_layers.gradient * self.stored + self.of_boundary.gradient * self.boundary


class _OnMesh(NamedTuple):
    """Parameters of a device on a mesh: of one layer and of embedding and head.

    Each as stored and as read, with the largest weight of the layer.
    """

    stored_layer: float
    layer: float
    largest: float
    stored_boundary: float
    boundary: float


@lru_cache(maxsize=10_000)
def _on_mesh(model: PlannedModel, mesh: tuple[int, ...]) -> _OnMesh:
    sizes, ends = mesh_sizes(mesh), (*model.embed, *model.head)
    return _OnMesh(
        stored_parameters(model.layer, sizes),
        gathered_parameters(model.layer, sizes),
        largest_weight(model.layer, sizes),
        stored_parameters(ends, sizes),
        gathered_parameters(ends, sizes),
    )


@lru_cache(maxsize=10_000)
def _token_bytes(model: PlannedModel, mesh: tuple[int, ...], policy: str) -> float:
    """Returns the bytes of a token that a layer keeps beside its input."""
    sizes = mesh_sizes(mesh)
    scores = token_bytes(model.scores, sizes, _FLOAT32) if policy == "none" else 0.0
    return token_bytes(model.saved(policy), sizes, model.activation_bytes) + scores


@lru_cache(maxsize=10_000)
def _passed_on_bytes(model: PlannedModel, mesh: tuple[int, ...], policy: str) -> float:
    """Returns the bytes of a token that a layer keeps for the next one to be computed again."""
    return token_bytes(model.passed_on(policy), mesh_sizes(mesh), model.activation_bytes)


@lru_cache(maxsize=10_000)
def _kept_bytes(model: PlannedModel, mesh: tuple[int, ...]) -> float:
    """Returns the bytes of a token in all tensors of a layer but scores."""
    return token_bytes(model.saved("none"), mesh_sizes(mesh), model.activation_bytes)


@lru_cache(maxsize=10_000)
def _live_bytes(model: PlannedModel, mesh: tuple[int, ...]) -> float:
    """Returns the bytes of a token that exist at a time while the backward of a layer runs."""
    sizes = mesh_sizes(mesh)
    itemsize = max(_FLOAT32, model.activation_bytes) if model.on_cpu else model.activation_bytes
    every = token_bytes(model.saved("none"), sizes, itemsize)
    share = _LIVE_ON_CPU if model.on_cpu else _LIVE
    expanded = _EXPANDED * token_bytes(model.expanded, sizes, model.activation_bytes)
    return expanded + share * (every + token_bytes(model.scores, sizes, _FLOAT32))


def _parts(model: PlannedModel, candidate: StepLayout, tokens: float) -> _Parts:
    mesh, sizes = candidate.mesh, _on_mesh(model, candidate.mesh)
    layers = candidate.layers_per_stage * candidate.chunks
    logits = _FLOAT32 * tokens * model.vocab / candidate.sizes["tensor"] / candidate.vocab_tiling
    return _Parts(
        layers * sizes.stored_layer,
        layers * sizes.layer,
        sizes.layer,
        sizes.stored_boundary,
        sizes.boundary,
        model.activation_bytes * model.hidden * tokens,
        tokens * _token_bytes(model, mesh, candidate.policy),
        tokens * _passed_on_bytes(model, mesh, candidate.policy),
        tokens * _live_bytes(model, mesh),
        _FOR_WEIGHTS * tokens * _kept_bytes(model, mesh),
        _LOGITS * logits,
        model.of_layers.gradient * sizes.largest,
        model.of_layers,
        model.of_boundary,
    )


def _state(parts: _Parts) -> tuple[float, float]:
    """Returns the bytes of stored weights and of the optimizer's state."""
    stored = parts.of_layers.weight * parts.stored + parts.of_boundary.weight * parts.boundary
    return stored, _MOMENTS * stored


def _unpipelined(model: PlannedModel, candidate: StepLayout, tokens: float) -> PeakMemory:
    parts, layers = _parts(model, candidate, tokens), model.num_layers
    weights, optimizer = _state(parts)
    # XLA casts all weights before the loop over layers.
    cast, one = parts.cast, parts.stored_grads
    sums = one if candidate.microbatches > 1 else 0.0
    activations = layers * (parts.activation + parts.kept)
    gathers = parts.of_layers.read * parts.layer if candidate.gathers else 0.0
    work = parts.layer_work + parts.largest
    in_layer, in_loss = one + gathers + work, parts.loss
    return PeakMemory(
        weights,
        optimizer,
        sums + (one if in_layer >= in_loss else 0.0),
        cast + (gathers if in_layer >= in_loss else 0.0),
        activations,
        0.0 if in_layer >= in_loss else parts.loss,
        work if in_layer >= in_loss else 0.0,
    )


def visit_bytes(model: PlannedModel, candidate: StepLayout, tokens: float) -> float:
    """Returns the bytes that one visit of a stage keeps for its backward.

    Args:
        model: The model.
        candidate: The layout.
        tokens: t.

    Returns:
        The bytes of a microbatch.
    """
    return _residuals(candidate, _parts(model, candidate, tokens))


def wgrad_bytes(model: PlannedModel, candidate: StepLayout, tokens: float) -> float:
    """Returns the bytes that the first half of a backward leaves for the second.

    Args:
        model: The model.
        candidate: The layout.
        tokens: t.

    Returns:
        The bytes of a microbatch on a stage.
    """
    return candidate.layers_per_stage * _parts(model, candidate, tokens).for_weights


def _residuals(candidate: StepLayout, parts: _Parts) -> float:
    """Returns the bytes that one visit of a stage keeps."""
    n = candidate.layers_per_stage
    masked = _masked_weights(candidate, parts)
    if candidate.scope == "layer":
        return n * (parts.activation + parts.kept) + masked
    return parts.activation + n * parts.kept + (n - 1) * parts.passed_on + masked


def _masked_weights(candidate: StepLayout, parts: _Parts) -> float:
    """Returns the bytes of weights that a visit keeps: those of layers that a mask may skip."""
    stored = candidate.scope == "layer" or candidate.policy == "none"
    if len(set(candidate.counts)) == 1 or not stored:
        return 0.0
    if candidate.gather == "layer" and candidate.gathers:
        return parts.of_layers.weight * parts.stored / candidate.chunks
    return parts.of_layers.read * parts.whole / candidate.chunks


def _recomputed(candidate: StepLayout, parts: _Parts) -> float:
    """Returns the bytes that the backward of a stage computes again, beside those of one layer."""
    n = candidate.layers_per_stage
    if n == 1 or candidate.scope == "layer" or candidate.policy == "none":
        return 0.0
    return n * parts.activation if candidate.scope == "both" else (n - 1) * parts.layer_work


def _circular(model: PlannedModel, candidate: StepLayout, tokens: float) -> PeakMemory:
    parts = _parts(model, candidate, tokens)
    S, M, v = candidate.num_ranks, candidate.microbatches, candidate.chunks
    grad = parts.of_layers.gradient
    weights, optimizer = _state(parts)
    halves = v >= 8  # two sets of buffers, each with an entry that ticks of the other write
    ticks = M * v + S - 1 + 2 * halves
    kept = ticks * _residuals(candidate, parts)
    every, gradients = kept, grad * parts.stored
    if halves:  # residuals of the later half are freed before gradients of the earlier half exist
        later = grad * parts.stored * (v - v // 2) / v
        first = kept * (v // 2) / v
        kept, gradients = max((kept, later), (first, gradients), key=sum)
    stage = parts.whole / v
    gathered, windows = _windows(candidate, parts, stage)
    gradients += 2 * grad * (parts.stored / v if candidate.gather == "tick" else stage)
    work, logits = parts.layer_work + _recomputed(candidate, parts), 0.0
    if every + parts.loss > kept + gradients + work:  # the loss is computed before any of these
        kept, gradients, work, logits = every, 0.0, 0.0, parts.loss
    boundary_grads, boundary = _boundary(candidate, parts)
    return PeakMemory(
        weights,
        optimizer,
        gradients + boundary_grads,
        gathered + windows + boundary,
        kept + _STREAM * max(1, M // S) * parts.activation,
        logits,
        work,
    )


def _windows(candidate: StepLayout, parts: _Parts, stage: float) -> tuple[float, float]:
    """Returns the bytes of gathered or cast weights of a rank, and of windows of a stage's."""
    of = parts.of_layers
    read, cast, grad = of.read, of.cast, of.gradient
    if not candidate.gathers:
        return cast * parts.whole, read * stage
    match candidate.gather:
        case "once":
            return read * parts.whole, read * stage
        case "repeat":
            return cast * parts.stored, 3 * read * stage
        case "tick":
            return cast * parts.stored, 2 * read * stage + grad * stage
        case "layer":
            return cast * parts.stored, 2 * read * parts.layer


def _boundary(candidate: StepLayout, parts: _Parts) -> tuple[float, float]:
    """Returns the bytes of sums of gradients of embedding and head, and of these as read."""
    of = parts.of_boundary
    if candidate.gathers:
        return of.gradient * parts.whole_boundary, of.read * parts.whole_boundary
    return of.gradient * parts.boundary, of.cast * parts.boundary


def _scheduled(model: PlannedModel, candidate: StepLayout, tokens: float, live: Live) -> PeakMemory:
    parts = _parts(model, candidate, tokens)
    weights, optimizer = _state(parts)
    stage = parts.whole / candidate.chunks
    of = parts.of_layers
    if not candidate.gathers:
        gathered, gradients = of.cast * parts.whole, of.gradient * parts.whole
    elif candidate.gather == "once":
        gathered, gradients = of.read * parts.whole, of.gradient * parts.whole
    elif candidate.gather == "repeat":
        gathered = 2 * of.read * stage
        gradients = of.gradient * (parts.stored + stage)
    elif candidate.gather == "layer":
        gathered = of.read * parts.layer
        gradients = of.gradient * parts.stored * _LAYOUT_COPIES
    else:
        gathered = of.cast * parts.stored + 2 * of.read * stage
        gradients = of.gradient * (parts.stored + stage)
    boundary_grads, boundary = _boundary(candidate, parts)
    # Those of one visit are on their way into their buffer, or out of it.
    kept = (live.residuals + 1) * _residuals(candidate, parts)
    # I leaves the input and the cotangent of every product with weights for W.
    kept += live.wgrad_residuals * candidate.layers_per_stage * parts.for_weights
    waiting = (live.waiting + 1) * parts.activation
    work = parts.layer_work + _recomputed(candidate, parts)
    return PeakMemory(
        weights,
        optimizer,
        gradients + boundary_grads,
        gathered + boundary,
        kept + waiting,
        parts.loss if parts.loss > work else 0.0,
        0.0 if parts.loss > work else work,
    )


_LAYOUT_COPIES = 1.25
"""XLA:TPU holds float32 gradients of attention twice, in two layouts, if layers gather."""
