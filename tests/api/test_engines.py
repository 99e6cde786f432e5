"""What the record of an engine says about it is what its functions do."""

from typing import get_args

import pytest

from jaxpipe.engines import CONFIG_ENGINES, ENGINES, engine_of_any_schedule, usual_engine
from jaxpipe.schedules import build
from jaxpipe.train import Config


def test_every_engine_has_a_value_of_pipeline_engine():
    values = get_args(Config.model_fields["pipeline_engine"].annotation)
    assert values == tuple(CONFIG_ENGINES)
    assert CONFIG_ENGINES["none"] is ENGINES["unpipelined"]
    for name, engine in CONFIG_ENGINES.items():
        assert Config.model_validate({"pipeline_engine": name}).engine is engine


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_has_a_schedule_of_its_own_if_it_pipelines_by_no_other(name: str):
    engine = ENGINES[name]
    assert engine.own_schedule is None or not engine.runs_schedules
    assert engine.pipelines == (name != "unpipelined")
    if engine.own_schedule is not None:
        own, chunks = engine.own_schedule, engine.own_schedule.default_chunks
        built = build(own.family, ranks=2, microbatches=4, chunks=chunks)
        assert engine.prepare(None, 2, 4, None, None)[0] == built


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_that_runs_ticks_prepares_them(name: str):
    engine = ENGINES[name]
    schedule = build("1f1b", ranks=2, microbatches=4) if engine.runs_schedules else None
    assert (engine.prepare(schedule, 2, 4, None, None)[1] is not None) == engine.runs_ticks


def test_a_schedule_takes_the_engine_that_has_it_as_its_own_or_one_that_runs_any():
    assert usual_engine(None) is ENGINES["unpipelined"]
    assert usual_engine("circular") is ENGINES["circular"]
    for schedule in ("1f1b", "no family", build("circular", ranks=2, microbatches=4)):
        assert usual_engine(schedule) is ENGINES["scheduled"] is engine_of_any_schedule()
