"""The memory of a device during a step, by kind, by arithmetic.

Peaks are those of the engines' own buffers: what a loop over ticks carries, and what the largest
of its phases makes beside that. Figures that are the compiler's are named as constants, and
docs/plan.md compares the sums with compiled programs. S ranks, v stages on each, M microbatches, t
tokens of a microbatch on a device.
"""

from dataclasses import dataclass, fields

from ...engines import OwnSchedule
from .._candidates import Live, StepLayout
from .._model import PlannedModel
from ._terms import MemoryTerms, memory_terms

_MOMENTS = 2

_STREAM = 4
"""Copies of a rank's microbatches that the circular engine holds: inputs, stream, results and
their cotangents."""


@dataclass(frozen=True)
class PeakMemory:
    """Bytes on a device at the peak of a step, by kind.

    Attributes:
        weights: Weights as they are stored between steps.
        optimizer: The state of the optimizer.
        gradients: Gradients of all weights, summed over microbatches.
        gathered: Weights as layers read them, and casts of them.
        activations: Residuals from forwards to backwards, and microbatches between ranks.
        logits: Logits and their cotangents, if the peak is in the loss.
        buffers: Temporaries of a layer, and buffers of engines and compilers.
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
        live: How many microbatches a rank stores at a time, for engines that run schedules.
    """
    if not candidate.engine.pipelines:
        return _unpipelined(model, candidate, tokens)
    if candidate.engine.own_schedule is not None:
        return _circular(model, candidate, tokens, candidate.engine.own_schedule)
    return _scheduled(model, candidate, tokens, live)


def _state(terms: MemoryTerms) -> tuple[float, float]:
    """Returns the bytes of stored weights and of the optimizer's state."""
    stored = terms.of_layers.weight * terms.stored + terms.of_boundary.weight * terms.boundary
    return stored, _MOMENTS * stored


def _unpipelined(model: PlannedModel, candidate: StepLayout, tokens: float) -> PeakMemory:
    terms, layers = memory_terms(model, candidate, tokens), model.num_layers
    weights, optimizer = _state(terms)
    of_layers = terms.of_layers.cast * terms.stored if model.hoists_casts else 0.0
    cast, gradients = of_layers + terms.of_boundary.cast * terms.boundary, terms.stored_grads
    sums = gradients if candidate.microbatches > 1 else 0.0
    activations = (layers + model.num_outer) * (terms.activation + terms.kept)
    gathers = terms.of_layers.read * terms.layer if candidate.gathers else 0.0
    if candidate.gathers and candidate.policy == "none":  # the forward keeps what it gathers
        gathers = model.gathered_bytes * terms.layer * layers
    if candidate.gathers:
        # Layers of the embedding keep what they gather for their backward. XLA:TPU gathers all
        # weights of embedding and head once for all microbatches.
        for_all = model.hoists_gathers and candidate.microbatches > 1
        cast += terms.of_boundary.read * (terms.whole_boundary if for_all else terms.outer)
    work = terms.layer_work + terms.largest
    # Parts of the logits add to the sum of the head's gradients, which is scattered at the end.
    head = terms.of_boundary.gradient * terms.head
    late = gradients + (head if candidate.gathers and candidate.vocab_tiling > 1 else 0.0)
    in_layer, in_loss = late + gathers + work, terms.loss
    return PeakMemory(
        weights,
        optimizer,
        sums + (late if in_layer >= in_loss else 0.0),
        cast + (gathers if in_layer >= in_loss else 0.0),
        activations,
        0.0 if in_layer >= in_loss else terms.loss,
        work if in_layer >= in_loss else 0.0,
    )


def stage_residual_bytes(model: PlannedModel, candidate: StepLayout, tokens: float) -> float:
    """Returns the bytes of the residuals of a stage."""
    return _residuals(candidate, memory_terms(model, candidate, tokens))


def wgrad_bytes(model: PlannedModel, candidate: StepLayout, tokens: float) -> float:
    """Returns the bytes that the first half of a backward leaves for the second."""
    return candidate.layers_per_stage * memory_terms(model, candidate, tokens).for_weights


def _residuals(candidate: StepLayout, terms: MemoryTerms) -> float:
    """Returns the bytes of the residuals of a stage for one microbatch."""
    n = candidate.layers_per_stage
    masked = _masked_weights(candidate, terms)
    if candidate.scope == "layer":
        return n * (terms.activation + terms.kept) + masked
    return terms.activation + n * terms.kept + (n - 1) * terms.passed_on + masked


def _masked_weights(candidate: StepLayout, terms: MemoryTerms) -> float:
    """Returns the bytes of weights that a visit keeps: those of layers that a mask may skip.

    With rematerialization they are read again.
    """
    if len(set(candidate.counts)) == 1 or candidate.policy != "none":
        return 0.0
    if candidate.gather == "layer" and candidate.gathers:
        return terms.of_layers.weight * terms.stored / candidate.chunks
    return terms.of_layers.read * terms.whole / candidate.chunks


def _recomputed(candidate: StepLayout, terms: MemoryTerms) -> float:
    """Returns the bytes that the backward of a stage computes again, beside those of one layer.

    The mask of a layer returns the weights that its backward reads.
    """
    n = candidate.layers_per_stage
    if candidate.policy == "none":
        return 0.0
    layers = n if candidate.scope == "tick" else 1
    is_masked = len(set(candidate.counts)) > 1
    masked = layers * terms.of_layers.weight * terms.layer if is_masked else 0.0
    if n == 1 or candidate.scope == "layer":
        return masked
    again = n * terms.activation if candidate.scope == "both" else (n - 1) * terms.layer_again
    return masked + again


def _circular(
    model: PlannedModel, candidate: StepLayout, tokens: float, schedule: OwnSchedule
) -> PeakMemory:
    terms = memory_terms(model, candidate, tokens)
    S, M, v = candidate.num_ranks, candidate.microbatches, candidate.chunks
    grad = terms.of_layers.gradient
    weights, optimizer = _state(terms)
    halves = v >= 8  # two sets of buffers, each with an entry that ticks of the other write
    ticks = schedule.num_ticks(S, v, M) + 2 * halves
    kept = ticks * _residuals(candidate, terms)
    every, gradients = kept, grad * terms.stored
    if halves:  # residuals of the later half are freed before gradients of the earlier half exist
        later = grad * terms.stored * (v - v // 2) / v
        first = kept * (v // 2) / v
        kept, gradients = max((kept, later), (first, gradients), key=sum)
    stage = terms.whole / v
    gathered = _circular_weights(candidate, terms)
    gradients += 2 * grad * (terms.stored / v if candidate.gather == "tick" else stage)
    work, logits = terms.layer_work + _recomputed(candidate, terms), 0.0
    boundary_grads, boundary = _boundary(candidate, terms)
    head = terms.of_boundary.gradient * terms.head or boundary_grads  # which may be tied
    embed = boundary_grads - head  # whose gradient is computed after the last tick
    if grad * terms.stored + embed > kept + gradients + work:
        kept, gradients, work = 0.0, grad * terms.stored + embed, 0.0
    if every + terms.loss > kept + gradients + work:  # the loss is computed before any of these
        kept, gradients, work, logits = every, 0.0, 0.0, terms.loss
        gathered += boundary  # which are freed after it
    return PeakMemory(
        weights,
        optimizer,
        gradients + head,
        gathered,
        kept + _STREAM * max(1, M // S) * terms.activation,
        logits,
        work,
    )


def _circular_weights(candidate: StepLayout, terms: MemoryTerms) -> float:
    """Returns the bytes of gathered or cast weights of a rank, and of windows of a stage's."""
    of, stage = terms.of_layers, terms.whole / candidate.chunks
    if not candidate.gathers:
        return of.read * stage
    match candidate.gather:
        case "once":
            return of.read * (terms.whole + stage)
        case "repeat":
            return 3 * of.read * stage
        case "tick":  # beside the window a tick's weights, and a gradient before it is a sum
            window = of.read * terms.stored / candidate.chunks
            return window + of.read * stage + terms.largest
        case "layer":
            return of.cast * terms.stored + 2 * of.read * terms.layer


def _boundary(candidate: StepLayout, terms: MemoryTerms) -> tuple[float, float]:
    """Returns the bytes of sums of gradients of embedding and head, and of these as read."""
    of = terms.of_boundary
    if candidate.gathers:
        return of.gradient * terms.whole_boundary, of.read * terms.whole_boundary
    return of.gradient * terms.boundary, of.cast * terms.boundary


def _scheduled(model: PlannedModel, candidate: StepLayout, tokens: float, live: Live) -> PeakMemory:
    terms = memory_terms(model, candidate, tokens)
    weights, optimizer = _state(terms)
    stage = terms.whole / candidate.chunks
    of = terms.of_layers
    if not candidate.gathers:
        gathered, gradients = of.cast * terms.whole, of.gradient * terms.whole
    elif candidate.gather == "once":
        gathered, gradients = of.read * terms.whole, of.gradient * terms.whole
    elif candidate.gather == "repeat":
        gathered = 2 * of.read * stage
        gradients = of.gradient * (terms.stored + stage)
    elif candidate.gather == "layer":
        gathered = of.read * terms.layer
        gradients = of.gradient * terms.stored
    else:
        gathered = of.cast * terms.stored + 2 * of.read * stage
        gradients = of.gradient * (terms.stored + stage)
    boundary_grads, boundary = _boundary(candidate, terms)
    kept = live.residuals * _residuals(candidate, terms)
    # I leaves the input and the cotangent of every product with weights for W.
    kept += live.wgrad_residuals * candidate.layers_per_stage * terms.for_weights
    waiting = (live.waiting + 1) * terms.activation
    work = terms.layer_work + _recomputed(candidate, terms)
    return PeakMemory(
        weights,
        optimizer,
        gradients + boundary_grads,
        gathered + boundary,
        kept + waiting,
        terms.loss if terms.loss > work else 0.0,
        0.0 if terms.loss > work else work,
    )
