"""Predicts the timeline of a step from the costs by which `auto` selects schedules."""

from ...engines import Engine, PipelinePlan
from ...schedules import Costs, Op, Timeline, analysis, builders, language
from ...schedules.analysis import TimedStep
from ...schedules.language import actions_of
from ..plan._schedule_selection import stage_costs


def predicted_timeline(engine: Engine, plan: PipelinePlan, *, recomputes: bool) -> Timeline | None:
    """Predicts the timeline of a step as the engine of a run executes the schedule.

    `circular` and `scheduled` run in ticks that all ranks share; in `mpmd` a rank goes on as soon
    as it can. An F of a layer costs 10.
    """
    if not engine.pipelines:
        return None
    layout = plan.layout
    costs = stage_costs(tuple(map(len, layout.stage_layer_ids)), recomputes=recomputes)
    if plan.schedule is not None:
        return engine.timeline(plan, costs)
    delay = 2 if plan.forwarding_delay else 1
    return _circular_timeline(
        plan.num_microbatches, layout.num_ranks, layout.num_repeats, delay, costs
    )


def _circular_timeline(
    num_microbatches: int, num_ranks: int, num_repeats: int, handover: int, costs: Costs
) -> Timeline:
    """Returns the timeline of a loop of ticks and its transpose, with `handover` ticks of delay."""
    schedule = builders.circular(num_ranks, num_microbatches, num_chunks=num_repeats)
    first, last = schedule.programs[0][0], schedule.programs[0][-1]
    forward, backward = analysis.duration(first, costs), analysis.duration(last, costs)
    turn = forward * builders.circular_ticks(num_ranks, num_repeats, num_microbatches, handover)

    def timed(rank: int, program: tuple[language.ScheduleStep, ...]) -> tuple[TimedStep, ...]:
        found = []
        for i, step in enumerate(program):
            if actions_of(step)[0].op is Op.F:
                start = (i + rank * handover) * forward
                found.append(TimedStep(step, start, start + forward))
            else:
                start = (
                    turn + (i - len(program) // 2 + (num_ranks - 1 - rank) * handover) * backward
                )
                found.append(TimedStep(step, start, start + backward))
        return tuple(found)

    rows = tuple(timed(rank, program) for rank, program in enumerate(schedule.programs))
    return Timeline(schedule, rows)
