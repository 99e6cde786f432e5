"""The prediction of a step: its parts add up, and its limits are those of arithmetic."""

import subprocess
import sys
from dataclasses import replace

import pytest

from jaxpipe.cost.training_step import Layout, build_schedule, predict
from jaxpipe.cost.work import ModelWork, flops_per_token, transformer
from jaxpipe.devices import HARDWARE, hardware
from jaxpipe.schedules import FAMILIES


def small() -> ModelWork:
    return transformer(layers=8, hidden=1024, heads=8, kv_heads=4, mlp=4096, vocab=32000)


LAYOUTS = {
    "one device": Layout(microbatches=4),
    "1f1b": Layout(stage=4, microbatches=8, schedule="1f1b"),
    "interleaved": Layout(stage=4, microbatches=8, schedule="interleaved_1f1b", chunks=2),
    "zbv and tensor": Layout(stage=4, tensor=2, microbatches=8, schedule="zbv"),
    "all axes": Layout(2, 2, 2, 2, context=2, microbatches=4, schedule="zero_bubble_h1"),
    "gathered once": Layout(fsdp=8, microbatches=2, gather="once", remat="full"),
}


@pytest.mark.parametrize("kind", ["v5p", "h100"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_parts_add_up_to_the_step(kind: str, name: str):
    found = predict(small(), LAYOUTS[name], hardware(kind))
    assert found.seconds == pytest.approx(sum(found.parts.values()))
    assert all(seconds >= 0 for seconds in found.parts.values())
    assert 0 < found.model_flops_utilization < 1


@pytest.mark.parametrize("schedule", FAMILIES)
def test_ranks_share_the_products_of_a_step(schedule: str):
    """Also where two ranks run a stage, each for half of the microbatches."""
    chunks = 2 if "chunks" in FAMILIES[schedule].takes else 1
    pipelined = Layout(stage=4, microbatches=16, schedule=schedule, chunks=chunks)
    parts = predict(small(), pipelined, hardware("v5p")).parts
    whole = predict(small(), Layout(microbatches=16), hardware("v5p")).parts
    assert parts["products"] == pytest.approx(whole["products"] / 4)
    own_state = parts["optimizer"] - whole["optimizer"] / 4
    assert 0 <= own_state < whole["optimizer"] / 4  # embedding and head are on one rank


def test_a_step_needs_at_least_its_operations_at_the_peak():
    work, layout, device = small(), Layout(rows=8), hardware("v5p")
    flops = flops_per_token(work, layout.sequence) * layout.batch * layout.sequence
    assert predict(work, layout, device).seconds > flops / device.peak_flops("bf16")


def test_more_microbatches_lessen_the_bubble():
    layout = LAYOUTS["1f1b"]
    few, many = (
        predict(small(), replace(layout, microbatches=m), hardware("h100")) for m in (8, 64)
    )
    assert many.bubble_fraction < few.bubble_fraction


def test_full_rematerialization_costs_a_forward():
    kept, again = (
        predict(small(), Layout(rows=8, remat=remat), hardware("h100"))
        for remat in ("none", "full")
    )
    assert again.parts["products"] == pytest.approx(kept.parts["products"] * 4 / 3, rel=0.05)


def test_layers_per_stage_must_add_up():
    layout = Layout(stage=2, microbatches=2, schedule="1f1b", layers_per_stage=(4, 3))
    with pytest.raises(ValueError, match="`layers_per_stage` is \\(4, 3\\)"):
        predict(small(), layout, hardware("v5p"))


def test_unknown_names_are_told():
    with pytest.raises(ValueError, match="Give one of v4, v5e"):
        hardware("h900")
    with pytest.raises(ValueError, match="no peak"):
        hardware("a100").peak_flops("fp8")


def test_every_device_has_a_source():
    assert all(device.source for device in HARDWARE.values())


def test_importing_the_cost_needs_no_jax():
    program = "import sys, jaxpipe.cost.training_step; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble_h1", "zbv", "looped_bfs"]
)
def test_many_microbatches_take_what_few_suggest(schedule: str):
    """A prediction simulates few microbatches and extrapolates; a given schedule it simulates."""
    layout = Layout(stage=4, microbatches=62, schedule=schedule, chunks=2)
    if schedule == "interleaved_1f1b":
        layout = replace(layout, microbatches=64)
    whole = replace(layout, schedule=build_schedule(layout))
    found = predict(small(), layout, hardware("h100"))
    assert found.seconds == pytest.approx(
        predict(small(), whole, hardware("h100")).seconds, rel=5e-3
    )
