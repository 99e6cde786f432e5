"""The engine `circular`: MaxText's circular pipeline in one program."""

from itertools import accumulate
from operator import attrgetter
from typing import Any

from .. import schedules
from ..autodiff import StagedModel
from ..schedules import Costs, Schedule, Timeline
from ..schedules.analysis import TimedStep, duration
from ..schedules.builders import circular_ticks
from ..schedules.lock_step import Ticks
from ..spmd import circular_engine
from . import _stacked
from ._engine import Engine, OwnSchedule, PipelinePlan
from ._jit import jit
from ._memory_cap import check_cap
from .fsdp import weight_gathers

_OWN_SCHEDULE = OwnSchedule("circular", default_chunks=1, num_ticks=circular_ticks)


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
    stored = own.num_ticks(num_ranks, chunks, num_microbatches) / chunks
    check_cap(
        memory_cap,
        stored,
        "the engine 'circular' stores what every tick leaves, that of {}",
        "a schedule of the engine 'scheduled', such as '1f1b'",
    )
    return circular, None


def _options(plan: PipelinePlan, weights: dict[str, Any], keys: Any) -> dict[str, Any]:
    """Returns the options of the circular pipeline; raises a `ValueError` if it cannot run."""
    layout = plan.layout
    circular_engine.check_circular(
        layout.num_ranks,
        layout.num_repeats,
        plan.num_microbatches,
        delay=plan.forwarding_delay,
        names=("`microbatches`", "`forwarding_delay`"),
    )
    gather, boundary_gather = weight_gathers(plan, weights, keys)
    return {
        "mesh": plan.mesh,
        "delay": plan.forwarding_delay,
        "gather": gather,
        "boundary_gather": boundary_gather,
        "vocab_parallel": plan.vocab_parallel,
        "scan_repeats": plan.scan_repeats,
        "scan_ticks": plan.scan_ticks,
    }


def _value(
    plan: PipelinePlan, model: StagedModel, weights: dict[str, Any], batch_inputs: Any, keys: Any
) -> Any:
    options = _options(plan, weights, keys)
    return circular_engine.circular_value(model, weights, batch_inputs, keys, **options)


def _value_and_grad(
    plan: PipelinePlan, model: StagedModel, weights: dict[str, Any], batch_inputs: Any, keys: Any
) -> Any:
    options = _options(plan, weights, keys)
    return circular_engine.circular_value_and_grad(
        model, weights, batch_inputs, keys, remat=plan.remat, **options
    )


def _timeline(plan: PipelinePlan, costs: Costs) -> Timeline:
    """Returns the timeline of a loop of ticks and its transpose, which all ranks run together."""
    assert plan.schedule is not None
    last, num_forwards = plan.layout.num_ranks - 1, plan.num_microbatches * plan.layout.num_repeats

    def tick(rank: int, i: int) -> int:
        if i < num_forwards:
            return i + rank * _handover(plan)
        return _num_ticks(plan) + i - num_forwards + (last - rank) * _handover(plan)

    programs = plan.schedule.programs
    lengths: list[Any] = [0] * (2 * _num_ticks(plan))
    for rank, program in enumerate(programs):
        for i, step in enumerate(program):
            lengths[tick(rank, i)] = max(lengths[tick(rank, i)], duration(step, costs))
    # A delayed hand-over runs beside the work of a whole tick.
    delay, transfer = plan.forwarding_delay, costs.transfer
    ticks = (max(x, transfer) if delay else x + transfer for x in lengths)
    starts = list(accumulate(ticks, initial=0))
    rows = (
        tuple(
            TimedStep(step, starts[tick(rank, i)], starts[tick(rank, i)] + duration(step, costs))
            for i, step in enumerate(program)
        )
        for rank, program in enumerate(programs)
    )
    return Timeline(plan.schedule, tuple(rows))


def _handover(plan: PipelinePlan) -> int:
    """Returns the ticks after which the next rank has what a rank computes."""
    return 2 if plan.forwarding_delay else 1


def _num_ticks(plan: PipelinePlan) -> int:
    counts = plan.layout.num_ranks, plan.layout.num_repeats, plan.num_microbatches
    return circular_ticks(*counts, _handover(plan))


def _kept_inputs(plan: PipelinePlan) -> tuple[int, ...]:
    """Returns the ticks: the loop keeps the stage input of each, also of those in a bubble."""
    return (_num_ticks(plan),) * plan.layout.num_ranks


def _may_divide(plan: PipelinePlan) -> bool:
    """Returns whether all ranks run the same functions in every tick, without branches."""
    has_padding = bool(plan.layout.counts or plan.kinds)  # layers that some ranks skip
    return not has_padding and _stacked.may_divide_rows(plan.mesh)


CIRCULAR = Engine(
    name="circular",
    config_name="circular",
    is_usual=True,
    pipelines=True,
    runs_schedules=False,
    options=frozenset(
        {"gather", "zero1", "forwarding_delay", "vocab_parallel", "scan_repeats", "scan_ticks"}
    ),
    per_stage_state=False,
    program_per_rank=False,
    shares_loss=True,
    check_call=_stacked.check_call,
    prepare=_prepare,
    layout=_stacked.round_robin_layout,
    layer_ids=attrgetter("layer_ids"),
    stack=_stacked.stack,
    unstack=_stacked.unstack,
    share=_stacked.share,
    own_copy=_stacked.own_copy,
    sum_shared=_stacked.sum_shared,
    layer_keys=_stacked.layer_keys,
    layer_shapes=_stacked.layer_shapes,
    stage=_stacked.stage,
    value=_value,
    value_and_grad=_value_and_grad,
    put=_stacked.put,
    shardings=_stacked.shardings,
    rank_bytes=_stacked.rank_bytes,
    step_bytes=_stacked.rank_bytes,
    init=_stacked.init,
    put_like=_stacked.put_like,
    gather=_stacked.gather,
    jit=jit,
    timeline=_timeline,
    kept_inputs=_kept_inputs,
    may_divide=_may_divide,
    own_schedule=_OWN_SCHEDULE,
)
