"""When a pipeline runs what, and how it looks in a notebook."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxpipe as jp
from jaxpipe.schedules import Costs, build, makespan, simulate
from jaxpipe.schedules.lock_step import simulate_ticks, to_lock_step

MODEL = jp.Model(
    embed=lambda w, batch: batch,
    layer=lambda w, x, batch: x * w,
    loss=lambda w, x, batch: jnp.mean(x),
)


def pipeline(schedule: Any, engine: str = "auto", **options: Any) -> Any:
    mesh = jp.make_mesh({"stage": 4}, devices=jax.devices()[:4])
    return jp.pipeline(
        MODEL, schedule=schedule, mesh=mesh, microbatches=8, engine=engine, **options
    )


def test_every_engine_says_when_it_runs_what():
    costs, schedule = Costs(1, 2, 1, 1), build("1f1b", ranks=4, microbatches=8)
    assert pipeline("1f1b", "mpmd").timeline(costs) == simulate(schedule, costs)
    ticks = to_lock_step(schedule)
    assert pipeline("1f1b").timeline(costs) == simulate_ticks(ticks, costs)
    circular = pipeline("circular", chunks=2).timeline()
    assert makespan(circular) == (2 * 8 + 3) * (1 + 2)  # ticks of F, then as many of B
    (row,) = pipeline(None).timeline(costs).rows
    assert [str(timed.step) for timed in row][:4] == ["0F0", "0B0", "0F1", "0B1"]


def test_costs_follow_the_layers_of_stages():
    row = pipeline("1f1b", "mpmd", layers_per_stage=(1, 2, 3, 1)).timeline().rows[2]
    assert {timed.end - timed.start for timed in row} == {3, 6}


@pytest.mark.parametrize("schedule", [None, "circular", "zero_bubble_h1"])
def test_a_notebook_draws_a_pipeline(schedule: Any):
    pipe = pipeline(schedule)
    svg = pipe._repr_svg_()
    assert svg.startswith("<svg")
    assert f">{pipe.engine.name}: " in svg


def test_a_pipeline_says_what_it_is():
    expected = "scheduled: 4 ranks, 4 stages, 8 microbatches, with F, I, W; mesh stage 4"
    assert repr(pipeline("zero_bubble_h1")) == f"PipelinedModel({expected})"
    assert repr(pipeline(None)) == "PipelinedModel(unpipelined: 8 microbatches; mesh stage 4)"
