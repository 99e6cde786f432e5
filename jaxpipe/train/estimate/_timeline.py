"""Predicts the timeline of a step from the costs by which `auto` selects schedules."""

from ...schedules import Timeline
from ..plan._schedule_selection import stage_costs
from ..plan._setup import StepPlan


def predicted_timeline(plan: StepPlan) -> Timeline | None:
    """Predicts the timeline of a step, if it has a pipeline; an F of a layer costs 10."""
    if not plan.engine.pipelines:
        return None
    counts = tuple(map(len, plan.pipeline.layout.stage_layer_ids))
    costs = stage_costs(counts, recomputes=plan.model.remat.recomputes)
    return plan.engine.timeline(plan.pipeline, costs)
