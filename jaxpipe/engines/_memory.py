"""The records in which engines say the memory of a step: entries of buffers, sizes, and a peak.

A cap of memory is in microbatches of a whole rank, the default unit of `schedules.search`: one is
what the forwards of a microbatch store in all stages of a rank. An engine counts activations: what
the forward of one stage stores.

An engine knows what its buffers hold and what lives beside them at the peak; sizes are those of a
model. Constants that are the compiler's are named. S ranks, v stages on each, M microbatches.
"""

from dataclasses import dataclass
from math import floor
from typing import Literal, NamedTuple

from ..schedules import Schedule, lock_step, num_ranks, peak_activations
from ..schedules.language import num_slices
from ..spmd import NO_OPTIONS, EngineOptions

_ROUNDING = 1e-9

LIVE = 0.8
"""What of the residuals of a layer exists at a time while XLA computes its backward."""


def loss_bytes(logits: float, itemsize: int) -> float:
    """Returns the bytes of temporary arrays of a loss that computes in float32.

    Args:
        logits: The number of logits that exist at a time.
        itemsize: The bytes of one as the head makes it. Narrow ones exist beside their copies in
            float32; cotangents of wide ones are in part bfloat16, and in part never stored.

    Returns:
        The bytes, those of the logits among them.
    """
    return (4 + itemsize if itemsize < 4 else 5) * logits


class StepCounts(NamedTuple):
    """Counts of a pipeline.

    Attributes:
        num_ranks: S, the ranks of the pipeline.
        chunks: v, the stages on each rank.
        num_microbatches: M, those of a call.
        gather: When weights are gathered; None if they are sharded over no axis that is gathered.
        num_calls: A, the calls of the engine in a step.
        options: Options that not all engines have.
        adds_in_loops: Without a pipeline: whether a loop over layers adds their gradients to the
            sums of microbatches; else those of a microbatch are there beside the sums.
        most_for_several: Without a pipeline: the bytes of a gathered layer up to which such a loop
            runs several in an iteration.
    """

    num_ranks: int
    chunks: int
    num_microbatches: int
    gather: Literal["tick", "once", "repeat", "layer"] | None
    num_calls: int = 1
    options: EngineOptions = NO_OPTIONS
    adds_in_loops: bool = True
    most_for_several: float = 0.0


class Buffers(NamedTuple):
    """Entries of the buffers of a rank: of a stage and a microbatch, or a slice of it, each.

    Attributes:
        residuals: Entries that hold what a backward reads.
        first_half: Entries of `residuals` that are freed after all others, of two sets of buffers;
            0 if there is one set.
        wgrad_residuals: Entries that hold what W reads, from I on.
        activations: Entries of activations and cotangents on their way.
        past: Entries of the state that slices of sequences carry.
        past_cotangents: Entries of its cotangents.
        num_slices: Slices of each microbatch.
        forwards_first: Whether all losses are computed before there are sums of gradients of
            stages.
    """

    residuals: int
    first_half: int = 0
    wgrad_residuals: int = 0
    activations: int = 0
    past: int = 0
    past_cotangents: int = 0
    num_slices: int = 1
    forwards_first: bool = False


class Sharded(NamedTuple):
    """Bytes on a device of arrays as they are stored, and gathered."""

    stored: float
    whole: float


class StepSizes(NamedTuple):
    """Bytes on a device of what a step is made of.

    Attributes:
        weights: Weights as they are stored, with copies of stages that other ranks store.
        optimizer: The state of the optimizer.
        grads: Sums of gradients of the layers of a rank.
        reads: These layers in the dtype in which they are read.
        casts: Copies of them in that dtype, if it is another than they are stored in.
        boundary_grads: Sums of gradients of embedding and head.
        boundary_read: These, gathered, in the dtype in which they are read.
        boundary_cast: Copies of them as they are stored, in that dtype, if it is another.
        head_grads: Sums of gradients of the head, gathered; 0 if the embedding has its weights.
        call_grads: All gradients in the dtype in which a call of the engine returns them.
        layer_read: One layer, gathered, in the dtype in which it is read.
        largest_grad: The gradient of the largest weight of a layer, gathered.
        activation: The input of a stage: one microbatch.
        residuals: Residuals of a stage and a microbatch.
        wgrad_residuals: Residuals of a microbatch that I leaves for W.
        work: Temporary arrays of the backward of a stage, beside `residuals`.
        loss: Temporary arrays of the loss of a microbatch.
        past: The state that slices of a sequence carry.
        past_cotangent: The cotangents of that state, in float32 at least.
        head_read: Without a pipeline: what the loss of one microbatch gathers, the head.
        outer_read: Without a pipeline: weights of embedding and head that are gathered at a time.
        outer_residuals: Residuals of layers of embedding and head and a microbatch, if they are
            not computed again.
        kept_read: Without a pipeline: gathered weights that forwards store for backwards.
    """

    weights: float
    optimizer: float
    grads: Sharded
    reads: Sharded
    casts: Sharded
    boundary_grads: Sharded
    boundary_read: float
    boundary_cast: float
    head_grads: float
    call_grads: float
    layer_read: float
    largest_grad: float
    activation: float
    residuals: float
    wgrad_residuals: float
    work: float
    loss: float
    past: float = 0.0
    past_cotangent: float = 0.0
    head_read: float = 0.0
    outer_read: float = 0.0
    outer_residuals: float = 0.0
    kept_read: float = 0.0

    @property
    def grad_sums(self) -> float:
        """Returns the bytes of the sums of all gradients, as these are stored."""
        return self.grads.stored + self.boundary_grads.stored


@dataclass(frozen=True)
class PeakMemory:
    """Bytes on a device at the peak of a step, by kind.

    Attributes:
        weights: Weights as they are stored between steps, and copies of stages that a rank runs and
            another one stores.
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
        return sum(vars(self).values())

    @property
    def largest(self) -> str:
        """Returns the kind that needs most."""
        return max(vars(self), key=vars(self).__getitem__)


def boundary_memory(counts: StepCounts, sizes: StepSizes) -> tuple[float, float]:
    """Returns the bytes of sums of gradients of embedding and head, and of these as read."""
    if counts.gather:
        return sizes.boundary_grads.whole, sizes.boundary_read
    return sizes.boundary_grads.stored, sizes.boundary_cast


def stored_residuals(buffers: Buffers, sizes: StepSizes) -> float:
    """Returns the bytes of the buffers of residuals."""
    return buffers.residuals * sizes.residuals / buffers.num_slices


def residuals_and_sums(buffers: Buffers, sizes: StepSizes, chunks: int) -> tuple[float, float]:
    """Returns the bytes of residuals and of stored sums of gradients when both together are most.

    Of two sets of buffers the later one is freed before there are gradients of the earlier chunks.
    """
    stored, sums = stored_residuals(buffers, sizes), sizes.grads.stored
    if not buffers.first_half:
        return stored, sums
    sums_of_later = sums * (chunks - lock_step.middle_chunk(chunks)) / chunks
    first = stored * buffers.first_half / buffers.residuals
    return max((stored, sums_of_later), (first, sums), key=sum)


def other_activations(buffers: Buffers, sizes: StepSizes) -> float:
    """Returns the bytes that are stored beside residuals: for W, on their way, and of slices."""
    of_slices = (
        buffers.wgrad_residuals * sizes.wgrad_residuals + buffers.activations * sizes.activation
    )
    past = buffers.past * sizes.past + buffers.past_cotangents * sizes.past_cotangent
    return of_slices / buffers.num_slices + past


def activation_cap(schedule: Schedule, memory_cap: float | None) -> int | None:
    """Returns the most activations that a rank may store."""
    if memory_cap is None:
        return None
    # What the forwards of a microbatch store on a rank, on average.
    per_microbatch = schedule.num_stages * num_slices(schedule) / num_ranks(schedule)
    peaks = peak_activations(schedule)
    fullest = max(range(len(peaks)), key=peaks.__getitem__)
    check_cap(
        memory_cap,
        peaks[fullest] / per_microbatch,
        f"`schedule` stores {{}} on rank {fullest}",
        f"a schedule that `schedules.search(..., memory_cap={memory_cap:g})` finds",
    )
    return floor(memory_cap * per_microbatch + _ROUNDING)


def check_cap(memory_cap: float | None, least: float, reason: str, instead: str) -> None:
    """Checks that an engine, which stores `least` microbatches of a whole rank, can keep a cap."""
    if memory_cap is not None and memory_cap < least - _ROUNDING:
        raise ValueError(
            f"`memory_cap` is {memory_cap:g} microbatches, and {reason.format(f'{least:g}')}. Give "
            f"at least {least:g}, or {instead}."
        )
