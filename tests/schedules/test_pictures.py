"""Timelines as text, SVG and Perfetto traces."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from math import floor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxpipe.schedules import (
    FAMILIES,
    Costs,
    build,
    makespan,
    num_ranks,
    parse,
    peak_activations,
    simulate,
    to_perfetto,
    to_svg,
    to_text,
)
from jaxpipe.schedules.builders import one_f_one_b
from jaxpipe.schedules.io import time_unit
from jaxpipe.schedules.language import enumerate_actions

from .legal import Case, cases, made

SVG = "{http://www.w3.org/2000/svg}"


def test_a_grid_has_a_column_per_unit_and_a_dot_per_idle_one():
    assert to_text(simulate(one_f_one_b(2, 2), Costs()), 1) == (
        "rank 0  0F0 0F1 .   .   0B0 --- .   0B1 ---\nrank 1  .   1F0 1B0 --- 1F1 1B1 --- .   ."
    )


def test_a_drawing_that_is_too_wide_is_cut_into_parts_with_their_times():
    timeline = simulate(one_f_one_b(2, 2), Costs())
    assert to_text(timeline, 1, max_width=43) == to_text(timeline, 1)
    assert to_text(timeline, 1, max_width=28) == (
        "time 0 to 5\nrank 0  0F0 0F1 .   .   0B0\nrank 1  .   1F0 1B0 --- 1F1\n\n"
        "time 5 to 9\nrank 0  --- .   0B1 ---\nrank 1  1B1 --- .   ."
    )
    assert to_text(timeline, 1, max_width=1).count("time ") == 9


def test_a_pair_prints_as_its_two_halves():
    timeline = simulate(parse("0F0 (0F1;0B0)OVERLAP_F_B 0B1"), Costs())
    assert to_text(timeline, 1) == "rank 0  0F0     0F1+0B0 ------- ------- 0B1     -------"


@given(cases(), st.lists(st.integers(1, 6), min_size=3, max_size=3))
@example(Case("circular", 1, 11, {"chunks": 3}), [5, 5, 6])  # 528, in columns of 5
@settings(max_examples=50, deadline=None)
def test_every_row_is_as_long_as_the_makespan_in_whole_columns(case: Case, costs: list[int]):
    schedule = made(case)
    forward, inputs, weight = costs
    timeline = simulate(schedule, Costs(forward, inputs, weight))
    unit = time_unit(timeline)
    for line in to_text(timeline, unit).splitlines():
        assert len(line.split()) - 2 == floor(makespan(timeline) / unit + 0.5)


def test_the_unit_divides_every_time():
    def unit(forward: float | int, inputs: float | int, weight: float | int):
        return time_unit(simulate(one_f_one_b(2, 2), Costs(forward, inputs, weight)))

    assert unit(10, 12, 8) == 10
    assert unit(10, 12, 9) == 1
    assert unit(0.5, 0.25, 0.5) == 0.25


def test_where_that_makes_too_many_columns_the_unit_is_the_shortest_action():
    timeline = simulate(one_f_one_b(2, 2), Costs(1.001, 1, 1))
    assert time_unit(timeline) == pytest.approx(1.001)
    assert all(
        str(action) in to_text(timeline, time_unit(timeline))
        for _, action in enumerate_actions(timeline.schedule)
    )


def test_a_unit_of_no_time_is_refused():
    with pytest.raises(ValueError, match="`unit` is 0"):
        to_text(simulate(one_f_one_b(2, 2), Costs()), 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_svg_is_wellformed_and_shows_every_action(name: str):
    schedule = build(name, ranks=4, microbatches=8)
    root = ElementTree.fromstring(to_svg(simulate(schedule, Costs(2, 2, 1)), name))
    titles = {element.text for element in root.iter(f"{SVG}title")}
    assert {title.split(" from ")[0] for title in titles if title} == {
        str(step) for program in schedule.programs for step in program
    }


def test_an_svg_says_its_figures_and_its_ranks():
    text = to_svg(simulate(one_f_one_b(4, 8), Costs()), "1f1b")
    assert "Makespan 33; bubble 9 (27.3%), parallelogram bubble 9." in text
    assert "Peak live activations 4, by rank 4 3 2 1." in text
    assert all(f">rank {rank}<" in text for rank in range(4))
    assert "forward F" in text
    assert "weight gradient W" not in text


def test_an_svg_stands_alone_and_escapes_its_title():
    text = to_svg(simulate(one_f_one_b(2, 2), Costs()), '<script>"&')
    ElementTree.fromstring(text)
    assert "<script>" not in text
    assert "href" not in text


def test_an_svg_of_very_many_actions_has_a_path_for_each_colour_of_a_rank():
    schedule = build("interleaved_1f1b", ranks=8, microbatches=256, chunks=2)
    text = to_svg(simulate(schedule, Costs()), "many")
    paths = [path.get("d") or "" for path in ElementTree.fromstring(text).iter(f"{SVG}path")]
    assert len(paths) == 8 * 2 * 2
    assert sum(path.count("M") for path in paths) == 8 * 256 * 2 * 2
    assert len(text) < 300_000


@given(cases())
@settings(max_examples=30, deadline=None)
def test_a_trace_has_every_step_and_counts_what_is_alive(case: Case):
    schedule = made(case)
    timeline = simulate(schedule, Costs(3, 2, 1))
    events = json.loads(to_perfetto(timeline, microseconds=10))["traceEvents"]
    for rank, row in enumerate(timeline.rows):
        steps = [e for e in events if e["ph"] == "X" and e["pid"] == rank]
        assert [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in steps] == [
            (str(t.step), 10 * t.start, 10 * t.end) for t in row
        ]
        alive = [e["args"]["count"] for e in events if e["ph"] == "C" and e["pid"] == rank]
        assert max(alive) == peak_activations(schedule)[rank]
        assert alive[-1] == 0
    assert num_ranks(schedule) == len({e["pid"] for e in events})


def test_notebooks_draw_schedules_and_timelines_and_their_names_are_short():
    schedule = one_f_one_b(4, 8)
    counts = "4 ranks, 4 stages, 8 microbatches, with F, B"
    timeline = simulate(schedule, Costs())
    assert repr(schedule) == f"Schedule({counts})"
    assert repr(timeline) == f"Timeline({counts}; makespan 33)"
    assert schedule._repr_svg_() == timeline._repr_svg_() == to_svg(timeline)
    assert f">{counts}<" in to_svg(timeline)
    assert parse("0B0 0F0")._repr_svg_() is None  # it cannot run


def test_the_colours_of_operations_are_those_of_okabe_and_ito():
    text = to_svg(simulate(build("zbv", ranks=2, microbatches=4), Costs()))
    okabe_ito = {"#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"}
    boxes = ElementTree.fromstring(text).iter(f"{SVG}rect")
    legend = [box.get("fill") for box in boxes if box.get("width") == "12.00"]
    assert set(legend[:3]) <= okabe_ito


def test_a_notebook_draws_schedules_without_an_import_of_the_pictures():
    program = """
from jaxpipe.schedules import parse
assert parse("0F0 0B0")._repr_svg_().startswith("<svg")
"""
    subprocess.run([sys.executable, "-c", program], check=True)
