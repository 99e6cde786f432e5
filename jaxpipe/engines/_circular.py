"""The engine `circular`: MaxText's circular pipeline in one program."""

from functools import partial
from itertools import accumulate
from typing import Any

from .. import schedules
from ..autodiff import StagedModel
from ..ir.transforms import LAST_PART
from ..schedules import Costs, Schedule, Timeline
from ..schedules.analysis import TimedStep, duration
from ..schedules.builders import circular_ticks
from ..schedules.lock_step import Ticks
from ..spmd import circular_engine
from . import _stacked
from ._engine import Engine, OwnSchedule, PipelineSpec
from ._jit import jit
from ._memory import (
    Buffers,
    PeakMemory,
    StepCounts,
    StepSizes,
    boundary_memory,
    check_cap,
    residuals_and_sums,
    stored_residuals,
)

# `value_and_grad` evaluates its derivative as a jaxpr in which the rules of `jax.custom_jvp` and
# `jax.custom_vjp` are expanded. JAX would differentiate what they expand to.
_NO_SECOND_DERIVATIVES = (
    "JAX differentiates the result of `value_and_grad` of the engine 'circular', which it cannot "
    "do correctly. Gradients are its second result; for other derivatives, such as a gradient "
    "penalty, differentiate `pipe.value`: `jax.grad(lambda params: pipe.value(params, batch)[0])`."
)

_OWN_SCHEDULE = OwnSchedule("circular", default_chunks=1)

_STREAM = 4
"""Copies of a rank's microbatches that XLA holds: inputs, stream, results and their cotangents."""


def _prepare(
    schedule: Schedule | None,
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None,
    memory_cap: float | None,
) -> tuple[Schedule, Ticks | None]:
    del costs
    own = _OWN_SCHEDULE
    chunks = own.default_chunks if schedule is None else schedule.num_stages // num_ranks
    circular = schedules.build(
        own.family, ranks=num_ranks, microbatches=num_microbatches, chunks=chunks
    )
    if schedule not in (None, circular):
        raise ValueError(
            "`schedule` is not the circular one, and `engine` is 'circular', which runs no other. "
            "Give `engine='scheduled'`, which runs any schedule in one program, or leave it out."
        )
    stored = circular_ticks(num_ranks, chunks, num_microbatches) / chunks
    check_cap(
        memory_cap,
        stored,
        "the engine 'circular' stores what every tick leaves, that of {}",
        "a schedule of the engine 'scheduled', such as '1f1b'",
    )
    return circular, None


def _arguments(spec: PipelineSpec, weights: dict[str, Any], keys: Any) -> dict[str, Any]:
    """Returns arguments of the circular pipeline; raises a `ValueError` if it cannot run."""
    layout = spec.layout
    circular_engine.check_circular(
        layout.num_ranks,
        layout.num_repeats,
        spec.num_microbatches,
        delay=spec.options.forwarding_delay,
        names=("`microbatches`", "`forwarding_delay`"),
    )
    return _stacked.pipeline_arguments(spec, weights, keys)


def _value(
    spec: PipelineSpec, model: StagedModel, weights: dict[str, Any], batch_inputs: Any, keys: Any
) -> Any:
    arguments = _arguments(spec, weights, keys)
    return circular_engine.circular_value(model, weights, batch_inputs, keys, **arguments)


def _value_and_grad(
    spec: PipelineSpec, model: StagedModel, weights: dict[str, Any], batch_inputs: Any, keys: Any
) -> Any:
    guard = partial(_stacked.undifferentiated, message=_NO_SECOND_DERIVATIVES)
    weights, batch_inputs = guard((weights, batch_inputs))
    arguments = _arguments(spec, weights, keys)
    result = circular_engine.circular_value_and_grad(
        model, weights, batch_inputs, keys, remat=spec.remat, **arguments
    )
    return guard(result)


def _timeline(spec: PipelineSpec, costs: Costs) -> Timeline:
    """Returns the timeline of a loop of ticks and its transpose, which all ranks run together."""
    assert spec.schedule is not None
    last, num_forwards = spec.layout.num_ranks - 1, spec.num_microbatches * spec.layout.num_repeats

    def tick(rank: int, i: int) -> int:
        if i < num_forwards:
            return i + rank * _handover(spec)
        return _num_ticks(spec) + i - num_forwards + (last - rank) * _handover(spec)

    programs = spec.schedule.programs
    lengths: list[Any] = [0] * (2 * _num_ticks(spec))
    for rank, program in enumerate(programs):
        for i, step in enumerate(program):
            lengths[tick(rank, i)] = max(lengths[tick(rank, i)], duration(step, costs))
    # A delayed hand-over runs beside the work of a whole tick. Of the result of a layer, which is
    # sent in parts, the next tick waits for the last part alone.
    delay, transfer = spec.options.forwarding_delay, costs.transfer
    waits = [transfer * LAST_PART if spec.layout.layers_per_stage == 1 else transfer, transfer]
    ticks = (
        max(x, transfer) if delay else x + waits[i >= _num_ticks(spec)]
        for i, x in enumerate(lengths)
    )
    starts = list(accumulate(ticks, initial=0))
    rows = (
        tuple(
            TimedStep(step, starts[tick(rank, i)], starts[tick(rank, i)] + duration(step, costs))
            for i, step in enumerate(program)
        )
        for rank, program in enumerate(programs)
    )
    return Timeline(spec.schedule, tuple(rows))


def _handover(spec: PipelineSpec) -> int:
    """Returns the ticks after which the next rank has what a rank computes."""
    return 1 + spec.options.forwarding_delay


def _num_ticks(spec: PipelineSpec) -> int:
    counts = spec.layout.num_ranks, spec.layout.num_repeats, spec.num_microbatches
    return circular_ticks(*counts, _handover(spec))


def _buffers(spec: PipelineSpec) -> tuple[Buffers, ...]:
    S = spec.layout.num_ranks
    counts = StepCounts(S, spec.layout.num_repeats, spec.num_microbatches, None)
    counts = counts._replace(options=spec.options)
    return (_expected_buffers(None, counts),) * S


def _expected_buffers(family: str | None, counts: StepCounts) -> Buffers:
    """Returns entries for all ticks, also those in which a rank is in a bubble."""
    del family
    S, v, M, delay = counts.num_ranks, counts.chunks, counts.num_microbatches, 1
    delay += counts.options.forwarding_delay
    entries = circular_engine.num_entries(circular_engine.PipelineShape(S, v, M, delay))
    return Buffers(
        sum(entries), sum(entries[:-1]), activations=_STREAM * max(1, M // S) + delay - 1
    )


def _memory(counts: StepCounts, buffers: Buffers, sizes: StepSizes) -> PeakMemory:
    v, grads = counts.chunks, sizes.grads
    every = stored_residuals(buffers, sizes)
    kept, gradients = residuals_and_sums(buffers, sizes, v)
    gathered = _gathered(counts, sizes)
    gradients += 2 * (grads.stored if counts.gather in ("tick", "layer") else grads.whole) / v
    work, logits = sizes.work, 0.0
    boundary_grads, boundary = boundary_memory(counts, sizes)
    embedded = max(1, counts.num_microbatches // counts.num_ranks)  # by each rank, before all ticks
    head = sizes.head_grads or boundary_grads
    embed = boundary_grads - head  # whose gradient is computed after the last tick
    if grads.stored + embed > kept + gradients + work:
        kept, gradients, work = 0.0, grads.stored + embed, 0.0
    if every + sizes.loss > kept + gradients + work:  # the loss is computed before any of these
        kept, gradients, work, logits = every, 0.0, 0.0, sizes.loss
        gathered += boundary  # which are freed after it
    return PeakMemory(
        weights=sizes.weights,
        optimizer=sizes.optimizer,
        gradients=gradients + head,
        gathered=gathered,
        activations=kept
        + buffers.activations * sizes.activation
        + embedded * sizes.outer_residuals,
        logits=logits,
        buffers=work,
    )


def _gathered(counts: StepCounts, sizes: StepSizes) -> float:
    """Returns the bytes of gathered or cast weights of a rank, and of windows of a stage's."""
    reads, v = sizes.reads, counts.chunks
    match counts.gather:
        case None:
            return reads.whole / v
        case "once":
            return reads.whole + reads.whole / v
        case "repeat":
            return 2 * reads.whole / v
        case "tick":  # beside the window a tick's weights, and a gradient before it is a sum
            return reads.stored / v + reads.whole / v + sizes.largest_grad
        case "layer":  # beside the window of a stage as it is stored
            return sizes.weights / v + 2 * sizes.layer_read


def _has_branches(spec: PipelineSpec) -> bool:
    """Returns whether some ranks skip layers."""
    return bool(spec.layout.counts or spec.kinds)


CIRCULAR = Engine(
    name="circular",
    config_name="circular",
    runs_schedules=False,
    options=frozenset(
        {
            *("gather", "zero1", "reduce_dtype", "forwarding_delay", "vocab_parallel"),
            *("scan_repeats", "scan_ticks"),
        }
    ),
    storage=_stacked.STORAGE,
    prepare=_prepare,
    layout=_stacked.round_robin_layout,
    stage=_stacked.stage,
    value=_value,
    value_and_grad=_value_and_grad,
    step_bytes=_stacked.rank_bytes,
    jit=jit,
    timeline=_timeline,
    buffers=_buffers,
    expected_buffers=_expected_buffers,
    memory=_memory,
    may_divide=lambda spec: not _has_branches(spec) and _stacked.may_divide_rows(spec.mesh),
    has_branches=_has_branches,
    shares_loss=True,
    stage_by_stage=True,
    own_schedule=_OWN_SCHEDULE,
)
