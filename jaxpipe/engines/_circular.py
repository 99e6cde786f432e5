"""The engine `circular`: MaxText's circular pipeline in one program."""

from operator import attrgetter
from typing import Any

from .. import schedules
from ..autodiff import StagedModel
from ..schedules import Costs, Schedule, Timeline, lock_step
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
    assert plan.schedule is not None
    return lock_step.simulate_ticks(lock_step.to_lock_step(plan.schedule, costs), costs)


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
    options=frozenset({"gather", "zero1", "forwarding_delay"}),
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
    may_divide=_may_divide,
    own_schedule=_OWN_SCHEDULE,
)
