"""The search is never worse than a named schedule, and never over its cap."""

import functools
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
    ActivationMemory,
    Problem,
    dispatch,
    pace_rules,
    rank_of_each_stage,
    to_schedule,
)
from jaxpipe.schedules.language import num_slices
from jaxpipe.schedules.lock_step import simulate_ticks, to_lock_step


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


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (4, 8, 0)])
@pytest.mark.parametrize("cap", [1, 2, 4])
def test_in_lock_step_the_figures_are_those_of_the_grid_within_the_cap(
    f: int, i: int, w: int, cap: int
):
    free = search(4, 8, Costs(f, i, w), cap, max_chunks=2)
    found = search(4, 8, Costs(f, i, w), cap, max_chunks=2, lock_step=True)
    times = []
    for schedule in (found.schedule, free.schedule):
        pieces = schedule.num_stages // 4
        of_stage = Costs(f / pieces, i / pieces, w / pieces)
        ticks = to_lock_step(check(schedule), of_stage, memory_cap=cap * pieces)
        times.append(makespan(simulate_ticks(ticks, of_stage)))
        if schedule is found.schedule:
            assert Fraction(max(peak_activations(ticks.schedule)), pieces) == found.peak <= cap
    assert found.bound <= found.makespan == found.step_time == pytest.approx(times[0])
    assert times[0] <= times[1] * (1 + 1e-9)


def test_in_lock_step_a_slot_is_as_large_as_the_largest_stage_and_the_least_cap_counts():
    memory = ActivationMemory((3, 6, 4, 5), (1, 2, 3, 2))
    find = functools.partial(
        search, 2, 6, Costs(), placement=(0, 1, 1, 0), memory=memory, lock_step=True
    )
    found = find(memory_cap=(25, 30))
    ticks = to_lock_step(found.schedule, Costs(), memory_cap=25 // 6)
    assert found.peak == 6 * max(peak_activations(ticks.schedule)) <= 25
    with pytest.raises(ValueError, match="the leanest schedule tried holds 12 on a rank"):
        find(memory_cap=11)  # 9 and 10 without lock-step


def test_families_of_a_given_placement_are_tried_whatever_its_chunks():
    costs, cap, loop = Costs(4.0, 4.0, 4.0), 35, rank_of_each_stage("loop", 4, 8)
    named = build("interleaved_1f1b", ranks=4, microbatches=8, chunks=8)
    ticks = simulate_ticks(to_lock_step(named, costs, memory_cap=cap), costs)
    found = search(4, 8, costs, cap, placement=loop, lock_step=True)
    assert found.makespan <= makespan(ticks)


def test_ticks_are_synchronous():
    with pytest.raises(ValueError, match="`lock_step` is True and `synchronous` False"):
        search(2, 4, Costs(), 2, synchronous=False, lock_step=True)
