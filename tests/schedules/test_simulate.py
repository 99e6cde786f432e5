"""Simulated times are the longest path through the dependencies; figures follow from them."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.schedules import (
    Costs,
    Op,
    activation_bytes,
    build,
    makespan,
    parse,
    peak_activations,
    simulate,
)
from jaxpipe.schedules.analysis import (
    TimedStep,
    busy_times,
    parallelogram_bubble,
    rectangular_bubble,
)
from jaxpipe.schedules.builders import one_f_one_b
from jaxpipe.schedules.language import parse_step

from . import obvious
from .legal import Case, cases, made

costs = st.integers(0, 20)


@given(cases(), costs, costs, costs, costs)
@settings(max_examples=40, deadline=None)
def test_the_makespan_is_the_longest_path(case: Case, f: int, i: int, w: int, transfer: int):
    schedule = made(case)
    timeline = simulate(schedule, Costs(f, i, w, transfer))
    assert makespan(timeline) == obvious.makespan(schedule, {"F": f, "I": i, "W": w}, transfer)


@given(cases(), st.data())
@settings(max_examples=40, deadline=None)
def test_no_schedule_beats_its_busiest_rank_or_one_microbatch_alone(case: Case, data):
    schedule = made(case)
    stages = schedule.num_stages
    f, i, w = (tuple(data.draw(costs) for _ in range(stages)) for _ in range(3))
    timeline = simulate(schedule, Costs(f, i, w))
    assert makespan(timeline) >= max(busy_times(timeline))
    assert makespan(timeline) >= sum(f) + sum(i)
    assert rectangular_bubble(timeline) >= parallelogram_bubble(timeline) >= 0


@given(cases(), costs, costs, costs, costs, st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_times_scale_with_the_costs(case: Case, f: int, i: int, w: int, transfer: int, k: int):
    schedule = made(case)
    one = simulate(schedule, Costs(f, i, w, transfer))
    many = simulate(schedule, Costs(k * f, k * i, k * w, k * transfer))
    assert many.rows == tuple(
        tuple(TimedStep(t.step, k * t.start, k * t.end) for t in row) for row in one.rows
    )


@given(cases())
@settings(max_examples=40, deadline=None)
def test_a_rank_does_one_thing_at_a_time_in_the_order_it_was_given(case: Case):
    schedule = made(case)
    timeline = simulate(schedule, Costs(3, 4, 2, transfer=1))
    for row, program in zip(timeline.rows, schedule.programs, strict=True):
        assert tuple(timed.step for timed in row) == program
        assert all(a.end <= b.start for a, b in pairwise(row))


def test_times_of_1f1b_are_those_of_the_picture():
    rows = simulate(one_f_one_b(2, 2), Costs()).rows
    assert [(str(t.step), t.start, t.end) for t in rows[0]] == [
        ("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 4, 6), ("0B1", 7, 9),
    ]  # fmt: skip
    assert [(str(t.step), t.start, t.end) for t in rows[1]] == [
        ("1F0", 1, 2), ("1B0", 2, 4), ("1F1", 4, 5), ("1B1", 5, 7),
    ]  # fmt: skip


def test_costs_may_differ_by_stage():
    timeline = simulate(one_f_one_b(2, 1), Costs((1, 5), (2, 6), (3, 7)))
    assert busy_times(timeline) == (6, 18)
    assert makespan(timeline) == 24
    assert rectangular_bubble(timeline) == 6


def test_a_transfer_costs_only_between_ranks():
    apart, folded = parse("0F0 0B0\n1F0 1B0"), parse("0F0 1F0 1B0 0B0")
    assert makespan(simulate(apart, Costs(transfer=5))) == 6 + 2 * 5
    assert makespan(simulate(folded, Costs(transfer=5))) == 6


PAIRED = parse("0F0 (0F1;0B0)OVERLAP_F_B 0B1\n1F0 1B0 1F1 1B1")


def test_an_atomic_pair_starts_when_both_halves_could():
    pair = simulate(PAIRED, Costs()).rows[0][1]
    assert (pair.start, pair.end) == (4, 7)


def test_a_pair_that_is_not_atomic_runs_its_forward_first():
    row = simulate(PAIRED, Costs(atomic_pairs=False)).rows[0]
    assert [(str(t.step), t.start, t.end) for t in row[1:3]] == [("0F1", 1, 2), ("0B0", 4, 6)]


def test_a_pair_can_be_cheaper_than_its_halves():
    pair = simulate(PAIRED, Costs(pair_factor=0.5)).rows[0][1]
    assert pair.end - pair.start == 1.5
    row = simulate(PAIRED, Costs(pair_factor=0.5, atomic_pairs=False)).rows[0]
    assert [t.end - t.start for t in row] == [1, 0.5, 1, 2]


@given(cases())
@settings(max_examples=40, deadline=None)
def test_the_peak_is_what_a_count_along_the_program_finds(case: Case):
    schedule = made(case)
    for rank, program in enumerate(schedule.programs):
        words = " ".join(map(str, program)).replace("(", "").replace(")OVERLAP_F_B", "")
        taken = [{"F": 1, "B": -1, "W": -1, "I": 0}[c] for c in words if c in "FBIW"]
        assert peak_activations(schedule)[rank] == max(
            sum(taken[: i + 1]) for i in range(len(taken))
        )


def test_bytes_are_the_peaks_weighted_by_stage():
    assert activation_bytes(one_f_one_b(3, 8), [7, 5, 3]) == (21, 10, 3)
    zbv = build("zbv", ranks=2, microbatches=4)
    assert activation_bytes(zbv, [1, 1, 1, 1]) == peak_activations(zbv)


def test_bytes_of_slices_are_a_share_of_their_microbatch():
    schedule = build("seq1f1b", ranks=3, microbatches=4, slices=2)
    assert peak_activations(schedule) == (4, 3, 2)
    assert activation_bytes(schedule, [11, 11, 11]) == (22, 17, 11)


def test_bytes_for_another_number_of_stages_are_refused():
    with pytest.raises(ValueError, match="`stage_bytes` has 2 entries for 3 stages"):
        activation_bytes(one_f_one_b(3, 8), [7, 5])


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (
            Costs(forward=(1, 2)),
            "`forward` has 2 entries for 3 stages. Give one number, or one per",
        ),
        (Costs(weight=-1), "`weight` is -1. Give times of 0 or more"),
        (Costs(input=(1, 1, float("nan"))), "`input` is .*nan.*. Give times of 0 or more"),
        (Costs(transfer=float("inf")), "`transfer` is inf"),
    ],
)
def test_costs_that_make_no_sense_are_named(costs: Costs, message: str):
    with pytest.raises(ValueError, match=message):
        simulate(one_f_one_b(3, 4), costs)


def test_costs_that_are_no_numbers_are_named():
    # Not by `Costs(...)`, whose types the tests check.
    for name, cost, message in (
        ("transfer", (1, 5), r"`transfer` is \(1, 5\)\. Give one number\."),
        ("forward", [1, 2, 3], r"`forward` is \[1, 2, 3\]\. Give one number, or a tuple with one"),
        ("weight", "1", "`weight` is '?1"),
    ):
        costs = Costs()
        object.__setattr__(costs, name, cost)
        with pytest.raises(ValueError, match=message):
            simulate(one_f_one_b(3, 4), costs)


def test_op_values_are_the_letters():
    assert [op.value for op in Op] == ["F", "B", "I", "W"]
    assert str(parse_step("3F0")) == "3F0"
