"""The time of a step: the arithmetic of loops, branches, kernels and collectives."""

import json
from pathlib import Path

import pytest

from jaxpipe.xla import audit
from jaxpipe.xla.compile_report import CompileReport, Memory, report_json, report_text
from jaxpipe.xla.hlo import Audit
from jaxpipe.xla.step_time import (
    KERNEL_EFFICIENCY,
    DeviceRates,
    estimated_time,
    instruction_costs,
    step_time,
    transfer_seconds,
)

RATES = DeviceRates(clock_ghz=1.0, peak_tflops=100.0, link_gb=10.0, network_gb=1.0)
"""A cycle takes a nanosecond, and 10 bytes pass a link in one."""

TEXT = (Path(__file__).parent / "hlo" / "written_step.hlo").read_text(encoding="utf-8")
NANO = 1e-9


def test_busy_time_is_cycles_times_executions():
    found = step_time(TEXT, RATES)
    assert found.busy_seconds["matrix products"] == pytest.approx(10 * 300 * NANO)
    assert found.busy_seconds["copies"] == pytest.approx(10 * 20 * NANO)
    assert found.busy_seconds["fills"] == pytest.approx(50 * NANO)
    # 10 of the sum outside; the dearer branch, in 3 of 10 ticks.
    assert found.busy_seconds["element-wise"] == pytest.approx((10 + 3 * 1000) * NANO)
    assert found.unmarked_seconds == 0


def test_a_branch_without_a_share_counts_as_always_taken_and_is_said():
    found = step_time(TEXT.replace("taken_3_of_10/", ""), RATES)
    assert found.busy_seconds["element-wise"] == pytest.approx((10 + 10 * 1000) * NANO)
    assert found.unmarked_seconds == pytest.approx(10_000 * NANO)


def test_kernels_count_by_their_operations():
    found = step_time(TEXT, RATES)
    flops = 2 * 2 * 2 * 256 * 256 * 128 / 2
    assert found.busy_seconds["kernels"] == pytest.approx(flops / (KERNEL_EFFICIENCY * 100e12))
    assert found.no_estimate == {"unknown": 1}


def test_a_collective_counts_for_what_nothing_overlaps_with():
    exposed = step_time(TEXT, RATES).exposed_seconds
    # 512 bytes over one link, of which a device has half; 10 ns of another addition overlap.
    assert exposed["all-gather"] == pytest.approx((512 / 2 / 10 - 10) * NANO)
    # Each of 4 sends 3/4 of 256 bytes through both links, twice.
    assert exposed["all-reduce"] == pytest.approx(2 * 256 * 3 / 8 / 10 * NANO)
    hidden = step_time(TEXT.replace('"estimated_cycles":"10"', '"estimated_cycles":"900"'), RATES)
    assert hidden.exposed_seconds["all-gather"] == 0


def test_bubbles_stretch_what_is_marked():
    found = step_time(TEXT, RATES, bubble=0.25)
    assert found.bubble_seconds == pytest.approx(3000 * NANO / 3)
    assert found.seconds == pytest.approx(found.busy + found.exposed + 1000 * NANO)
    with pytest.raises(ValueError, match=r"`bubble` is 1.0. Give the share"):
        step_time(TEXT, RATES, bubble=1.0)


def test_the_dearest_come_first_with_their_line_of_python():
    (product, sites), *_ = [item for item in step_time(TEXT, RATES).dearest(2) if item[0].source]
    assert (product.name, sites, product.executions) == ("fusion.1", 1, 10)
    assert product.source == "_loop.py:7"  # the caller of JAX's own line
    marked = [cost for cost in instruction_costs(TEXT, RATES) if cost.marked]
    assert [(cost.name, cost.executions) for cost in marked] == [("add.1", 3)]


def test_time_over_links():
    def seconds(kind: str, groups: str, *, across: bool = False) -> float:
        return transfer_seconds(kind, 1_000, groups, RATES, across_slices=across)

    assert seconds("collective-permute", "{{0,1},{1,0}}") == pytest.approx(100 * NANO)
    assert seconds("collective-permute", "", across=True) == pytest.approx(1000 * NANO)
    mesh = "mesh['stage'=2,'fsdp'=4] {'fsdp'}"
    assert seconds("all-gather", mesh) == pytest.approx(1_000 * 3 / 8 / 10 * NANO)
    assert seconds("reduce-scatter", mesh) == pytest.approx(4_000 * 3 / 8 / 10 * NANO)
    assert seconds("all-to-all", mesh) == pytest.approx(500 / 10 * NANO)


def test_the_report_says_what_a_step_amounts_to():
    time = estimated_time(TEXT, "TPU v5")
    report = CompileReport(
        platform="TPU v5",
        num_devices=4,
        memory=Memory(0, 0, 0, 0, 0),
        audit=Audit((), ()),
        model_flops=4 * 459e12 * 1e-6,
        compile_seconds=1.0,
        jax_version="0.12.0",
        libtpu_version="0.0.50",
        step_time=time,
        tokens=1_000,
    )
    assert time is not None
    found = json.loads(report_json(report, num_dearest=3))["step_time"]
    assert found["seconds"] == pytest.approx(time.seconds)
    assert found["tokens_per_second"] == pytest.approx(1_000 / time.seconds)
    assert found["mfu"] == pytest.approx(1e-6 / time.seconds)
    assert [row["total"] for row in found["dearest"]] == sorted(
        (row["total"] for row in found["dearest"]), reverse=True
    )
    text = report_text(report, num_dearest=3)
    assert "time per step, estimated" in text
    assert "Without an estimate: unknown x 1." in text
    assert "_loop.py:7" in text


def test_what_an_instruction_waits_for_is_not_what_it_calls():
    waits = TEXT.replace("calls=%products,", "calls=%products, control-predecessors={%x},")
    assert step_time(waits, RATES).busy_seconds == step_time(TEXT, RATES).busy_seconds
    assert audit(waits) == audit(TEXT)
    (gather, _) = audit(TEXT).sites
    assert not gather.beside_product
    behind = TEXT.replace(
        "%work = f32[8,8]{1,0} add(%p, %fill)", "%work = f32[8,8]{1,0} dot(%p, %fill)"
    )
    assert audit(behind).sites[0].beside_product


def test_devices_without_cycles_have_no_estimate():
    assert estimated_time(TEXT, "cpu") is None


_GROUPED = (Path(__file__).parent / "hlo" / "written_grouped.hlo").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "share"), [("jit(step)/rows_1_of_4/shard_map/pallas_call", 4), ("pallas_call", 8)]
)
def test_grouped_products_skip_rows_of_other_devices(name: str, share: int):
    """A scope says the share of rows that have a group: its own, or where XLA drops that, one of
    its neighbours'."""
    found = step_time(_GROUPED.replace("NAME", name), RATES)
    flops = 2 * 1024 * 256 * 512 / share
    assert found.busy_seconds["kernels"] == pytest.approx(flops / (KERNEL_EFFICIENCY * 100e12))
