"""The play of a program, with every form in which XLA:TPU writes an asynchronous collective."""

import re
from pathlib import Path

import pytest

from jaxpipe.xla.step_time import DeviceRates, StepTime, step_time

RATES = DeviceRates(clock_ghz=1.0, peak_tflops=100.0, link_gb=10.0, network_gb=1.0)
"""A cycle takes a nanosecond, 10 bytes pass a link in one, and a byte the network."""

HLO = Path(__file__).parent / "hlo"
NANO = 1e-9


def read(name: str) -> str:
    return (HLO / f"{name}.hlo").read_text(encoding="utf-8")


def with_cycles(text: str, name: str, cycles: int) -> str:
    """The program in which the compiler estimates cycles for an instruction."""
    line = next(x for x in text.splitlines() if re.match(rf"\s+(ROOT )?%{re.escape(name)} = ", x))
    without = line.partition(", backend_config=")[0]
    return text.replace(line, f'{without}, backend_config={{"estimated_cycles":"{cycles}"}}')


def moved_before(text: str, name: str, other: str) -> str:
    """The program in which an instruction runs right before another."""
    line, before = (
        next(x for x in text.splitlines() if re.match(rf"\s+%{re.escape(n)} = ", x))
        for n in (name, other)
    )
    return text.replace(f"{line}\n", "").replace(before, f"{line}\n{before}")


def play(text: str) -> StepTime:
    return step_time(text, RATES)


# A program, what runs beside its collective, its kind, and the nanoseconds of the transfer.
FORMS = {
    "start and done": ("written_step", "work", "all-gather", 512 / 2 / 10),
    "call on a SparseCore": (
        *("tpu7x_sparsecore_call", "fusion", "reduce-scatter"),
        8 * (512 * 4096 * 2) * 7 / 16 / 10,
    ),
    "chain of fusions": (
        *("v5e_continuation_fusions", "fusion.14", "all-gather"),
        (4096 * 4096 * 2) * 7 / 16 / 10,
    ),
    "send and recv between slices": (
        *("v5p_nested_loops_in_two_slices", "dynamic-slice.4", "collective-permute"),
        128 * 1024 * 2,
    ),
}


@pytest.mark.parametrize(("name", "beside", "kind", "nanoseconds"), FORMS.values(), ids=[*FORMS])
def test_what_runs_beside_a_collective_hides_it(name, beside, kind, nanoseconds):
    text = read(name)
    whole = play(with_cycles(text, beside, 0)).exposed_seconds[kind]
    times = 15 if kind == "collective-permute" else 1  # the innermost loop's iterations
    for cycles, hidden in ((10, 10.0), (10**9, nanoseconds)):
        exposed = play(with_cycles(text, beside, cycles)).exposed_seconds[kind]
        assert whole - exposed == pytest.approx(times * hidden * NANO)


def test_a_call_on_a_sparsecore_begins_when_it_has_its_operands():
    text = with_cycles(read("tpu7x_sparsecore_call"), "fusion", 1000)
    assert play(text).hidden_share("reduce-scatter") > 0
    early = moved_before(text, "fusion", "reduce-scatter.2.cloned.1.call-update")
    assert play(early).hidden_share("reduce-scatter") == 0


def test_a_fused_all_reduce_that_is_sliced_moves_as_a_reduce_scatter():
    time = play(read("v5p_reduce_scatter_fusion"))
    # Each of two sends half of the whole array.
    assert time.exposed_seconds["reduce-scatter"] == pytest.approx(2048 * 2048 * 2 / 2 / 10 * NANO)
    assert time.transfer_seconds == pytest.approx(time.exposed_seconds)


def test_many_collectives_in_flight_queue_for_the_links():
    text = read("written_step")
    start, done = (
        next(line for line in text.splitlines() if f"%gather-{part} =" in line)
        for part in ("start", "done")
    )
    count = 60  # each window holds all later ones
    starts = [start.replace("%gather-", f"%more{i}-") for i in range(count)]
    ends = [done.replace("%gather-", f"%more{i}-") for i in range(count)]
    text = text.replace(start, "\n".join([*starts, start])).replace(done, "\n".join([done, *ends]))
    assert text.count(" all-gather-start(") == count + 1
    # Only the 10 ns of work are hidden, of all together.
    seconds = (count + 1) * 512 / 2 / 10 - 10
    assert play(text).exposed_seconds["all-gather"] == pytest.approx(seconds * NANO)


def test_transfers_in_a_loop_delay_those_around_it():
    text = read("written_step")
    done = next(line for line in text.splitlines() if "%gather-done =" in line)
    reduced = next(line for line in text.splitlines() if "%reduced =" in line)
    inside = reduced.replace("%reduced", "%inner").replace("%work", "%x")
    loop = text.replace(f"{done}\n", "").replace("  ROOT %result", f"{done}\n  ROOT %result")
    # 13 microseconds of loop hide the gather, and what it waits for is counted once.
    assert play(loop).exposed_seconds["all-gather"] == 0
    first = next(line for line in loop.splitlines() if "%i = s32[]" in line)
    both = play(loop.replace(first, f"{first}\n{inside}"))
    assert both.exposed_seconds["all-gather"] == 0
    assert both.transfer_seconds["all-reduce"] == pytest.approx(11 * 2 * 256 * 3 / 8 / 10 * NANO)
    idle = re.sub(r'"estimated_cycles":"\d+"', '"estimated_cycles":"0"', loop)
    exposed = play(idle.replace(first, f"{first}\n{inside}")).exposed_seconds
    assert sum(exposed.values()) >= 512 / 2 / 10 * NANO


def test_a_loop_waits_at_the_end_of_an_iteration_for_what_it_has_started():
    text = read("v5p_nested_loops_in_two_slices")
    text = "\n".join(line for line in text.splitlines() if " recv-done(" not in line)
    assert play(text).exposed_seconds["collective-permute"] >= 15 * 128 * 1024 * 2 * NANO
