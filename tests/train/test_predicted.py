from itertools import pairwise

import pytest

from jaxpipe import schedules
from jaxpipe.schedules import Costs, Timeline, analysis
from jaxpipe.schedules.language import actions_of, dependencies, outputs
from jaxpipe.train.plan import Setup

from .runs import NONE, Settings, setup_of

S2: Settings = {"ici_pipeline_parallelism": 2}
S4: Settings = {"ici_pipeline_parallelism": 4, "num_pipeline_microbatches": 8}
RUNS: dict[str, tuple[int, Settings]] = {
    "circular": (2, S2),
    "circular, one repeat": (4, S4),
    "circular, delay": (2, S2 | {"pipeline_delay_activation_forwarding": True}),
    "scheduled": (2, S2 | {"pipeline_engine": "scheduled", "pipeline_schedule": "zbv"}),
    "mpmd, uneven": (
        2,
        S2
        | {
            "pipeline_engine": "mpmd",
            "pipeline_schedule": "1f1b",
            "pipeline_layout": "Et|t*3L",
        },
    ),
}


def timeline_of(setup: Setup) -> Timeline | None:
    return setup.step.predicted_timeline


@pytest.mark.parametrize("name", RUNS)
def test_nothing_starts_before_what_it_needs(name: str):
    timeline = timeline_of(setup_of(*RUNS[name]))
    assert timeline is not None
    boundary = {
        result: timed.end
        for row in timeline.rows
        for timed in row
        for action in actions_of(timed.step)
        for result in outputs(action)
    }
    for row in timeline.rows:
        assert all(before.end <= after.start for before, after in pairwise(row))
        for timed in row:
            for action in actions_of(timed.step):
                for need in dependencies(action, timeline.schedule.num_stages, 1):
                    assert boundary[need] <= timed.start


@pytest.mark.parametrize(
    ("name", "num_ticks"),
    [("circular", 4 * 2 + 1), ("circular, one repeat", 8 + 3), ("circular, delay", 4 * 2 + 2)],
)
def test_a_circular_step_is_its_ticks_forward_and_backward(name: str, num_ticks: int):
    timeline = timeline_of(setup_of(*RUNS[name]))
    assert timeline is not None
    # A forward is 10, its backward 10 again to recompute, 10 for the input and 10 for weights.
    assert schedules.makespan(timeline) == num_ticks * (10 + 30)


def test_the_bubble_is_the_one_that_the_run_prints():
    setup = setup_of(*RUNS["scheduled"])
    timeline = timeline_of(setup)
    assert timeline is not None and setup.schedule_reason is not None
    share = analysis.rectangular_bubble(timeline) / schedules.makespan(timeline)
    assert f"bubble {share:.1%}" in setup.schedule_reason


def test_longer_stages_take_longer_and_no_pipeline_has_no_timeline():
    timeline = timeline_of(setup_of(*RUNS["mpmd, uneven"]))
    assert timeline is not None
    costs = Costs((10, 30), (20, 60), (10, 30))
    assert timeline == schedules.simulate(timeline.schedule, costs)
    assert timeline_of(setup_of(1, NONE | {"num_pipeline_microbatches": 1})) is None
