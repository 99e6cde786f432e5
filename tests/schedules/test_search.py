"""The search is never worse than a named schedule, and never over its cap."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.schedules import (
    FAMILIES,
    Costs,
    build,
    check,
    makespan,
    peak_activations,
    search,
    simulate,
)
from jaxpipe.schedules.analysis.search import (
    Problem,
    dispatch,
    pace_rules,
    rank_of_each_stage,
    to_schedule,
)
from jaxpipe.schedules.language import num_slices


@pytest.mark.parametrize("cap", [1, 3, 8])
@pytest.mark.parametrize(("f", "i", "w", "transfer"), [(1, 1, 1, 0), (10, 14, 9, 2)])
def test_no_named_schedule_within_the_cap_is_faster(
    cap: int, f: int, i: int, w: int, transfer: int
):
    found = search(4, 8, Costs(f, i, w, transfer), cap, max_chunks=2)
    assert found.peak <= cap
    check(found.schedule)
    for name in FAMILIES:
        schedule = build(name, ranks=4, microbatches=8)
        pieces = schedule.num_stages * num_slices(schedule) // 4
        of_a_stage = Costs(f / pieces, i / pieces, w / pieces, transfer)
        fits = Fraction(max(peak_activations(schedule)), pieces) <= cap
        if fits and name != "seq1f1b":
            assert found.makespan <= makespan(simulate(schedule, of_a_stage)) + 1e-9


def test_memory_buys_time():
    spans = [search(3, 6, Costs(10, 12, 8), cap, max_chunks=2).makespan for cap in (1, 2, 6)]
    assert spans == sorted(spans, reverse=True)


def test_what_was_found_says_how_to_build_it():
    found = search(4, 8, Costs(), 8, max_chunks=3)
    assert build(found.name, ranks=4, microbatches=8, **dict(found.arguments)) == found.schedule


def test_sequence_slices_are_tried_where_they_are_allowed():
    assert search(4, 2, Costs(), 8, max_chunks=2, max_slices=8).name == "seq1f1b"


def test_a_cap_below_every_schedule_is_refused_with_the_least():
    with pytest.raises(
        ValueError, match=r"`memory_cap` is 0.5, and the leanest schedule tried holds 1 "
    ):
        search(2, 4, Costs(), 0.5)


def test_costs_per_stage_are_refused():
    with pytest.raises(ValueError, match="`forward` is one cost per stage"):
        search(2, 4, Costs(forward=(1, 2)), 4)


@given(
    st.integers(1, 5),
    st.integers(1, 8),
    st.integers(1, 6),
    st.tuples(*[st.integers(0, 9)] * 4),
    st.sampled_from([("straight", 1), ("v", 2), ("loop", 2), ("v", 4), ("loop", 3)]),
)
@settings(max_examples=60, deadline=None)
def test_list_schedules_are_right_and_within_their_cap(
    p: int, m: int, cap: int, costs: tuple[int, int, int, int], placement: tuple[str, int]
):
    f, i, w, transfer = costs
    rank_of = rank_of_each_stage(*placement[:1], p, placement[1])
    n = len(rank_of)
    caps = (cap * n // p,) * p
    ones = (1,) * n
    problem = Problem(rank_of, m, ((f,) * n, (i,) * n, (w,) * n), transfer, ones, ones, caps)
    words, time = dispatch(
        problem, pace_rules(problem, pace=0.5, wait_forward=0.5, wait_weight=0, reserve=0)
    )
    schedule = check(to_schedule(problem, words))
    assert max(peak_activations(schedule)) <= caps[0]
    assert makespan(simulate(schedule, Costs(f, i, w, transfer))) <= time
