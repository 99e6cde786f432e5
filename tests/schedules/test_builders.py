"""Every builder reads like its paper, is right for all it accepts, and says what it refuses."""

import re

import pytest
from hypothesis import given, settings

from jaxpipe.schedules import FAMILIES, Schedule, build, check, num_ranks, peak_activations
from jaxpipe.schedules.builders import (
    dualpipe,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_h2,
)
from jaxpipe.schedules.language import num_slices, ranks_of_stage, stages_of_rank

from .legal import Case, cases, counts, is_legal, made
from .obvious import is_valid


def test_one_f_one_b_reads_like_the_paper():
    assert str(one_f_one_b(3, 4)) == (
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n"
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n"
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    )


def test_interleaved_one_f_one_b_reads_like_the_paper():
    assert str(interleaved_one_f_one_b(2, 4, num_chunks=2, group_size=2)) == (
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3\n"
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"
    )


def test_zero_bubble_h1_reads_like_the_paper():
    assert str(zero_bubble_h1(2, 3)) == (
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2\n1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
    )


def test_looped_bfs_retraces_its_forward():
    assert str(looped_bfs(2, 2, num_chunks=2)) == (
        "0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0\n1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0"
    )


def test_dualpipe_holds_two_copies_of_every_stage():
    schedule = dualpipe(4, 8)
    assert [ranks_of_stage(schedule, stage) for stage in range(4)] == [
        (0, 3),
        (1, 2),
        (1, 2),
        (0, 3),
    ]


@given(counts())
@settings(max_examples=200, deadline=None)
def test_a_builder_accepts_exactly_the_counts_its_constraints_allow(case: Case):
    if is_legal(case):
        check(made(case))
    else:
        with pytest.raises(ValueError, match=r"`\w+` (is|\d).*Give "):
            made(case)


@given(cases())
@settings(max_examples=80, deadline=None)
def test_every_schedule_is_right_by_the_obvious_rules(case: Case):
    schedule = made(case)
    assert is_valid(schedule)
    assert check(schedule) is schedule


@pytest.mark.parametrize("name", FAMILIES)
def test_a_schedule_has_the_counts_it_was_asked_for(name: str):
    schedule = build(name, ranks=4, microbatches=8)
    assert num_ranks(schedule) == 4
    assert schedule.num_microbatches == 8
    assert num_slices(schedule) == (2 if name == "seq1f1b" else 1)
    chunks = {len(stages_of_rank(schedule, rank)) for rank in range(4)}
    v = schedule.num_stages // 4 * (2 if name == "dualpipe" else 1)
    assert chunks == {v}


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if "chunks" in f.takes])
def test_chunks_are_as_many_as_asked_for(name: str):
    schedule = build(name, ranks=3, microbatches=6, chunks=5)
    assert stages_of_rank(schedule, 1) == (1, 4, 7, 10, 13)


def test_one_f_one_b_holds_at_most_the_ranks_behind_it():
    for p in range(1, 7):
        for m in range(1, 9):
            assert peak_activations(one_f_one_b(p, m)) == tuple(min(m, p - r) for r in range(p))


@given(cases())
@settings(max_examples=50, deadline=None)
def test_the_same_counts_give_the_same_schedule(case: Case):
    assert hash(made(case)) == hash(made(case))


def test_an_unknown_name_is_refused_with_all_names_and_the_nearest():
    with pytest.raises(
        ValueError, match=r"There is no schedule 'zbw'\. Did you mean 'zbv'"
    ) as caught:
        build("zbw", ranks=4, microbatches=8)
    assert all(name in str(caught.value) for name in FAMILIES)


def test_an_argument_a_family_does_not_take_is_refused():
    message = "`chunks` is 2, but 1f1b takes none such. Leave `chunks` out, or choose one of"
    with pytest.raises(ValueError, match=message):
        build("1f1b", ranks=4, microbatches=8, chunks=2)
    with pytest.raises(ValueError, match="seq1f1b takes `slices`"):
        build("seq1f1b", ranks=4, microbatches=8, latency=0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpipe", {"ranks": 0}, "`ranks` is 0. Give at least 1."),
        ("looped_bfs", {"chunks": 0}, "`chunks` is 0. Give at least 1."),
        ("1f1b", {"microbatches": -1}, "`microbatches` is -1. Give at least 1."),
        (
            "circular",
            {"microbatches": 6},
            "6, no multiple of 4 ranks. Give 4, or choose looped_bfs",
        ),
        ("interleaved_1f1b", {"microbatches": 9}, "unequal size. Give 8 microbatches, or a group"),
        ("interleaved_1f1b", {"group": 3}, "`group` is 3 for 4 ranks. Give at least 4, or"),
        ("kimi_k2", {"group": 5}, "a last group of 3 of 8 microbatches, fewer than 4 ranks"),
        ("grouped_interleaved", {"group": 1}, "`group` is 1 for 4 ranks. Give 2"),
        ("zero_bubble_h1", {"microbatches": 3}, "3, fewer than 4 stages. Give at least 4"),
        ("zero_bubble_h2", {"microbatches": 6}, "fewer than the 7 that keep 4 stages busy"),
        ("zero_bubble_h2", {"latency": 1}, "`microbatches` is 8, fewer than the 13"),
        ("zero_bubble_h2", {"latency": -1}, "`latency` is -1. Give 0 or more"),
        ("zero_bubble_h2", {"spare": -1}, "`spare` is -1. Give 0 or more"),
        ("dualpipe", {"ranks": 3}, "`ranks` is 3, which is odd. Give an even number"),
        ("dualpipe", {"microbatches": 9}, "`microbatches` is 9, which is odd"),
        (
            "dualpipe",
            {"microbatches": 6},
            "`microbatches` is 6; to cross on every rank takes 8",
        ),
        ("dualpipev", {"microbatches": 7}, "is 7; to cross on every rank takes 8. Give at least 8"),
    ],
)
def test_counts_that_cannot_be_scheduled_are_named(
    name: str, options: dict[str, int], message: str
):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(name, **{"ranks": 4, "microbatches": 8, **options})


def test_builders_of_functions_and_of_names_are_the_same():
    assert build("zero_bubble_h2", ranks=3, microbatches=9, latency=0.5) == zero_bubble_h2(
        3, 9, latency=0.5
    )


def in_order(schedule: Schedule, rank: int, *chains: tuple[str, ...]) -> bool:
    """Whether the actions of each chain that exist follow each other on a rank."""
    place = {str(step): i for i, step in enumerate(schedule.programs[rank])}
    places = [
        [place[f"{rank}{name}"] for name in chain if f"{rank}{name}" in place] for chain in chains
    ]
    return all(chain == sorted(chain) for chain in places)


@pytest.mark.parametrize("latency", [0, 0.5, 1])
def test_zero_bubble_h2_keeps_the_clauses_of_its_definition(latency: float | int):
    p = 4
    schedule = zero_bubble_h2(p, 18, latency=latency)
    for r in range(p):
        e, c = (int(2 * (p - s) - 1 + 2 * (p - s - 1) * latency) for s in (r, p - 1 - r))
        for i in range(18):
            forwards = (f"F{i + e - 1}", f"I{i}", f"F{i + e}")
            assert in_order(schedule, r, forwards, (f"I{i + c - 1}", f"W{i}", f"I{i + c}"))


def test_zero_bubble_h1_keeps_the_clauses_of_its_definition():
    p = 4
    schedule = zero_bubble_h1(p, 11)
    for r in range(p):
        for i in range(11):
            forwards = (f"F{i + p - r - 1}", f"I{i}", f"F{i + p - r}")
            weights = (f"I{i + r}", f"W{i}", f"I{i + r + 1}")
            assert in_order(schedule, r, forwards, weights, (f"W{i}", f"F{i + p}"))
