"""`check` accepts what computes the gradient, and names the action that keeps it from that."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.schedules import Schedule, ScheduleError, build, check, parse
from jaxpipe.schedules.builders import interleaved_one_f_one_b, one_f_one_b

from .legal import Case, cases, made
from .obvious import is_valid

seeds = st.integers(0, 2**32)


def with_program(schedule: Schedule, rank: int, program: list) -> Schedule:
    programs = list(schedule.programs)
    programs[rank] = tuple(program)
    return Schedule(schedule.num_stages, schedule.num_microbatches, tuple(programs))


@given(cases(), seeds)
@settings(max_examples=40, deadline=None)
def test_a_missing_action_is_caught(case: Case, seed: int):
    schedule = made(case)
    rank = random.Random(seed).randrange(len(schedule.programs))
    program = list(schedule.programs[rank])
    program.pop(random.Random(seed).randrange(len(program)))
    with pytest.raises(ScheduleError, match="No rank runs"):
        check(with_program(schedule, rank, program))


@given(cases(), seeds)
@settings(max_examples=40, deadline=None)
def test_an_action_that_is_there_twice_is_caught(case: Case, seed: int):
    schedule = made(case)
    draw = random.Random(seed)
    source, target = (draw.randrange(len(schedule.programs)) for _ in range(2))
    program = list(schedule.programs[target])
    program.insert(draw.randint(0, len(program)), draw.choice(schedule.programs[source]))
    with pytest.raises(ScheduleError, match="has already run"):
        check(with_program(schedule, target, program))


@given(cases(), seeds)
@settings(max_examples=120, deadline=None)
def test_two_actions_changing_places_is_judged_as_the_obvious_rules_judge_it(case: Case, seed: int):
    schedule = made(case)
    draw = random.Random(seed)
    rank = draw.randrange(len(schedule.programs))
    program = list(schedule.programs[rank])
    a, b = draw.randrange(len(program)), draw.randrange(len(program))
    if draw.random() < 0.5:
        b = min(a + 1, len(program) - 1)
    program[a], program[b] = program[b], program[a]
    assert accepts(with_program(schedule, rank, program)) == is_valid(
        with_program(schedule, rank, program)
    )


@given(cases(), seeds)
@settings(max_examples=40, deadline=None)
def test_an_action_that_moves_to_another_rank_is_judged_so_too(case: Case, seed: int):
    schedule = made(case)
    draw = random.Random(seed)
    source, target = (draw.randrange(len(schedule.programs)) for _ in range(2))
    program = list(schedule.programs[source])
    step = program.pop(draw.randrange(len(program)))
    moved = with_program(schedule, source, program)
    program = list(moved.programs[target])
    program.insert(draw.randint(0, len(program)), step)
    moved = with_program(moved, target, program)
    assert accepts(moved) == is_valid(moved)


def accepts(schedule: Schedule) -> bool:
    try:
        check(schedule)
    except ScheduleError:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0B0 0F1", "No rank runs 0I1 (or 0B1). Add it to rank 0"),
        ("0F0 0I0", "No rank runs 0W0. Add it to rank 0"),
        ("0F0 0F0 0B0", "Rank 0 runs 0F0, but rank 0 has already run 0F0:\n  0F0 0F0 <- here 0B0"),
        ("0F0 0B0 0W0", "Rank 0 runs 0W0, but rank 0 has already run 0B0, which includes 0W0"),
        ("0F0 0I0 0B0 0W0", "Rank 0 runs 0B0, but rank 0 has already run 0I0"),
        ("0F0\n0B0", "Rank 1 runs 0B0, but 0F0 and its activations are on rank 0"),
        ("1F0 1B0", "No rank runs 0F0. Add it to any rank"),
        ("0F0s0 0F0s1 0B0", "Rank 0 runs 0B0, but other microbatches come in slices s0 to s1"),
        ("0F0s0 0B0", "Rank 0 runs 0B0, but other microbatches come in slices s0 to s0"),
        ("0F0s0 0F0s1 0B0s1", "No rank runs 0I0s0 (or 0B0s0). Add it to rank 0"),
    ],
)
def test_what_is_wrong_is_named_with_its_action_and_rank(text: str, message: str):
    with pytest.raises(ScheduleError) as caught:
        check(parse(text))
    assert message in str(caught.value)


def test_counts_out_of_range_are_named():
    programs = parse("0F0 0B0 1F1 1B1").programs
    with pytest.raises(ScheduleError, match="Rank 0 runs 1F1, but there are only 1 stages"):
        check(Schedule(1, 2, programs))
    with pytest.raises(ScheduleError, match="Rank 0 runs 1F1, but there are only 1 microbatches"):
        check(Schedule(2, 1, programs))


def test_a_deadlock_is_shown_with_who_waits_for_whom():
    with pytest.raises(ScheduleError) as caught:
        check(parse("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0"))
    assert str(caught.value) == (
        "The schedule deadlocks:\n"
        "  rank 0 waits at 0B0 for 1B0, which rank 1 has not reached\n"
        "  rank 1 waits at 1F1 for 0F1, which rank 0 has not reached\n"
        "Move the marked action behind what it waits for, or that before it:\n"
        "  0F0 0B0 <- here 0F1 0B1\n"
        "  1F1 1B1 1F0 1B0"
    )


def test_a_rank_that_waits_for_itself_is_the_culprit():
    with pytest.raises(ScheduleError, match=r"waits at 1B0 for 1F0(.|\n)*\n  1B0 <- here 1F0"):
        check(parse("0F0 0B0\n1B0 1F0"))


def test_both_halves_of_a_pair_start_together():
    # On its own the forward could run, and the backward after it. As one they wait for each other.
    check(parse("0F0 0B0\n1F0 1B0"))
    with pytest.raises(ScheduleError, match=r"waits at \(1F0;1B0\)OVERLAP_F_B for 1F0"):
        check(parse("0F0 0B0\n(1F0;1B0)OVERLAP_F_B"))


def test_slices_keep_to_causal_order():
    check(parse("0F0s0 0F0s1 0B0s1 0B0s0"))
    with pytest.raises(ScheduleError, match="waits at 0F0s1 for 0F0s0"):
        check(parse("0F0s1 0F0s0 0B0s1 0B0s0"))
    with pytest.raises(ScheduleError, match="waits at 0B0s0 for 0B0s1"):
        check(parse("0F0s0 0F0s1 0B0s0 0B0s1"))


def test_groups_shorter_than_the_pipeline_would_deadlock_and_are_refused():
    with pytest.raises(ValueError, match="choose grouped_interleaved"):
        interleaved_one_f_one_b(4, 8, num_chunks=2, group_size=2)


def test_a_schedule_error_is_a_value_error():
    assert issubclass(ScheduleError, ValueError)
    assert check(one_f_one_b(2, 2)) == build("1f1b", ranks=2, microbatches=2)
