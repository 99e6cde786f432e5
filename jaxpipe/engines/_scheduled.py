"""The engine `scheduled`: any schedule in one program, in lock-step."""

from functools import lru_cache, partial
from typing import Any

from ..autodiff import StagedModel
from ..autodiff.staged_model import run_sliced_layers
from ..schedules import FAMILIES, Costs, Schedule, Timeline, language, lock_step
from ..schedules.lock_step import Ticks
from ..spmd import scheduled_engine
from . import _stacked
from ._engine import Engine, PipelineSpec
from ._jit import jit
from ._memory import (
    Buffers,
    PeakMemory,
    StepCounts,
    StepSizes,
    activation_cap,
    boundary_memory,
    other_activations,
    residuals_and_sums,
    stored_residuals,
)

# The transpose of the loop over ticks has collectives in conditionals that only some ranks enter,
# so it would hang.
_NO_DERIVATIVES = (
    "What the engine 'scheduled' computes is differentiated by JAX. The gradients of all "
    "parameters are the second result of `pipe.value_and_grad`; for those of other arrays, such as "
    "the batch or what functions of the model close over, give `schedule=None`."
)


def _prepare(
    schedule: Schedule | None,
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None,
    memory_cap: float | None,
) -> tuple[Schedule, Ticks]:
    del num_ranks, num_microbatches
    if schedule is None:
        raise ValueError("`engine` is 'scheduled' and `schedule` is None. Give a schedule.")
    cap = activation_cap(schedule, memory_cap)
    ticks = _in_lock_step(schedule, costs, cap)
    lock_step.rank_and_chunk_by_stage(ticks.schedule)  # raises if ranks have unequally many stages
    return ticks.schedule, ticks


@lru_cache(maxsize=8)
def _in_lock_step(schedule: Schedule, costs: Costs | None, memory_cap: int | None) -> Ticks:
    """Returns the grid, which a run asks for twice, and a planner for all layouts that share it."""
    return lock_step.to_lock_step(schedule, costs, memory_cap=memory_cap)


def _value(
    spec: PipelineSpec, model: StagedModel, weights: dict[str, Any], batch_inputs: Any, keys: Any
) -> Any:
    assert spec.schedule is not None
    weights, batch_inputs = _stacked.undifferentiated((weights, batch_inputs), _NO_DERIVATIVES)
    forwards = lock_step.to_lock_step(language.forward_only(spec.schedule))
    arguments = _stacked.pipeline_arguments(spec, weights, keys)
    result = scheduled_engine.scheduled_value(
        model, weights, batch_inputs, keys, ticks=forwards, **arguments
    )
    return _stacked.undifferentiated(result, _NO_DERIVATIVES)


def _value_and_grad(
    spec: PipelineSpec, model: StagedModel, weights: dict[str, Any], batch_inputs: Any, keys: Any
) -> Any:
    assert spec.ticks is not None
    weights, batch_inputs = _stacked.undifferentiated((weights, batch_inputs), _NO_DERIVATIVES)
    arguments = _stacked.pipeline_arguments(spec, weights, keys)
    result = scheduled_engine.scheduled_value_and_grad(
        model, weights, batch_inputs, keys, ticks=spec.ticks, remat=spec.remat, **arguments
    )
    return _stacked.undifferentiated(result, _NO_DERIVATIVES)


def _step_bytes(spec: PipelineSpec, weights: dict[str, Any], tied: bool) -> tuple[int, ...]:
    """Returns the bytes of weights on a device of every rank, with copies of others' stages."""
    assert spec.schedule is not None
    stages = _stacked.rank_bytes(spec, {"stages": weights["stages"]}, tied)
    stored, copies = _stacked.rank_bytes(spec, weights, tied), language.num_copies(spec.schedule)
    return tuple(
        a + b * copies // spec.layout.num_repeats for a, b in zip(stored, stages, strict=True)
    )


def _timeline(spec: PipelineSpec, costs: Costs) -> Timeline:
    assert spec.ticks is not None
    return lock_step.simulate_ticks(spec.ticks, costs)


def _buffers(spec: PipelineSpec) -> tuple[Buffers, ...]:
    """Returns the buffers by the tables of the ticks, which are equally large on all ranks."""
    assert spec.ticks is not None
    slots, residuals = _slots(spec.ticks, spec.gather == "repeat")
    on_rank = Buffers(
        sum(residuals),
        residuals[0] if len(residuals) > 1 else 0,
        wgrad_residuals=slots["wgrad_residuals"],
        activations=slots["inputs"] + slots["cotangents"] + 1,  # and the one that is computed with
        past=slots["past"],
        past_cotangents=slots["past_cotangents"],
        num_slices=language.num_slices(spec.ticks.schedule),
        forwards_first=lock_step.has_forwards_first(spec.ticks),
    )
    return (on_rank,) * spec.layout.num_ranks


@lru_cache(maxsize=8)
def _slots(ticks: Ticks, in_halves: bool) -> tuple[dict[str, int], list[int]]:
    """Returns the slots of every buffer, and those of each set of buffers of residuals.

    Sets are in the order in which forwards fill them.
    """

    def residuals(slots: dict[str, int]) -> int:
        return max(slots["residuals_for_backward"], slots["residuals_for_weight"])

    slots = lock_step.buffer_slots(ticks)
    if not in_halves:
        return slots, [residuals(slots)]
    loops = lock_step.tick_loops(lock_step.tick_tables(ticks), in_halves=True)
    return slots, [residuals(loop.num_slots) for loop in loops if not loop.forward.is_idle]


def expected_buffers(family: str | None, counts: StepCounts) -> Buffers:
    """Returns the buffers by closed forms of the family; a schedule of none is taken for 1F1B."""
    S, v, M = counts.num_ranks, counts.chunks, counts.num_microbatches
    if family not in FAMILIES:
        return Buffers(min(M * v, 2 * S - 1), activations=3)
    facts = FAMILIES[family]
    live, first = facts.most_live(S, M, v), 0
    if facts.is_breadth_first and counts.gather == "repeat" and lock_step.middle_chunk(v):
        # Where a loop ends ranks are S - 1 microbatches apart; fewer if they wait, as M < S.
        live, first = live + S - 1, lock_step.middle_chunk(v) * M
    return Buffers(
        live,
        first,
        wgrad_residuals=min(M * v, S) if facts.splits_backward else 0,
        activations=facts.most_waiting(S, M) + 1,
        forwards_first=facts.is_breadth_first,
    )


def memory(counts: StepCounts, buffers: Buffers, sizes: StepSizes) -> PeakMemory:
    """Returns the peak of a step.

    Buffers, gradients and gathered weights all exist during every tick; but if forwards come first,
    losses are computed before there are gradients of stages.
    """
    v, grads, reads = counts.chunks, sizes.grads, sizes.reads
    stored = residuals = stored_residuals(buffers, sizes)
    match counts.gather:
        case None:
            gathered, gradients = sizes.casts.whole, grads.whole
        case "once":
            gathered, gradients = reads.whole, grads.whole
        case "repeat":
            residuals, sums = residuals_and_sums(buffers, sizes, v)
            gathered, gradients = 2 * reads.whole / v, sums + grads.whole / v
        case "layer":  # sums are divided as weights are, also with ZeRO-1
            gathered, gradients = sizes.layer_read, grads.whole * reads.stored / reads.whole
        case "tick":
            gathered = sizes.casts.stored + 2 * reads.whole / v
            gradients = grads.stored + grads.whole / v
    boundary_grads, boundary = boundary_memory(counts, sizes)
    work, loss = sizes.work / buffers.num_slices, sizes.loss / buffers.num_slices
    in_loss = 0.0 if buffers.forwards_first else gradients
    if stored + in_loss + loss > residuals + gradients + work:
        residuals, gradients, work = stored, in_loss, 0.0
    else:
        loss = 0.0
    return PeakMemory(
        weights=sizes.weights,
        optimizer=sizes.optimizer,
        gradients=gradients + boundary_grads,
        gathered=gathered + boundary,
        activations=residuals + other_activations(buffers, sizes),
        logits=loss,
        buffers=work,
    )


SCHEDULED = Engine(
    name="scheduled",
    config_name="scheduled",
    runs_schedules=True,
    options=frozenset({"gather", "zero1", "reduce_dtype", "vocab_parallel", "costs"}),
    storage=_stacked.STORAGE,
    prepare=_prepare,
    layout=_stacked.layout_of_schedule,
    stage=_stacked.stage,
    value=_value,
    value_and_grad=_value_and_grad,
    step_bytes=_step_bytes,
    jit=jit,
    timeline=_timeline,
    buffers=_buffers,
    expected_buffers=expected_buffers,
    memory=memory,
    may_divide=lambda spec: False,
    has_branches=lambda spec: True,
    sliced_stage=partial(_stacked.stage, run=run_sliced_layers),
)
