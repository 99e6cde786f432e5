"""Ticks: what lock-step costs, what it never breaks, and where everything lies."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.schedules import (
    FAMILIES,
    Costs,
    Op,
    Schedule,
    ScheduleError,
    build,
    check,
    makespan,
    parse,
    peak_activations,
    simulate,
)
from jaxpipe.schedules.builders import dualpipe, gpipe, one_f_one_b, seq1f1b, zbv, zero_bubble_h1
from jaxpipe.schedules.language import enumerate_actions, stages_of_rank, without_fused_pairs
from jaxpipe.schedules.lock_step import (
    CopyRound,
    Grid,
    RankAndChunk,
    Ticks,
    TickTables,
    WeightCopies,
    candidate_lags,
    candidate_spares,
    check_ticks,
    enumerate_ticks,
    fill_grid,
    rank_and_chunk_by_stage,
    rank_orders,
    simulate_ticks,
    tick_loops,
    tick_tables,
    ticks_from_grid,
    to_lock_step,
)

from .machine import run_loops, run_tables
from .random_schedules import Draft, drafts, forwards_first, random_schedule

ONES = Costs()
LIKE_MODELS = Costs(10, 20, 10)


def price(schedule: Schedule, costs: Costs) -> tuple[Any, Any]:
    """Makespans: free, and in lock-step."""
    ticks = check_ticks(to_lock_step(schedule, costs))
    return makespan(simulate(schedule, costs)), makespan(simulate_ticks(ticks, costs))


@pytest.mark.parametrize("costs", [ONES, LIKE_MODELS, Costs(10, 12, 8)])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (3, 7), (4, 8), (4, 16), (8, 32)])
def test_the_textbook_schedules_cost_what_they_do_without_lock_step(ranks, microbatches, costs):
    for schedule in (gpipe(ranks, microbatches), one_f_one_b(ranks, microbatches)):
        free, lock = price(schedule, costs)
        whole = costs.forward + costs.input + costs.weight
        assert free == lock == (microbatches + ranks - 1) * whole


@pytest.mark.parametrize("costs", [ONES, LIKE_MODELS])
@pytest.mark.parametrize("num_chunks", [2, 3])
def test_interleaved_schedules_do_too(num_chunks, costs):
    for schedule in (
        build("interleaved_1f1b", ranks=4, microbatches=16, chunks=num_chunks),
        build("looped_bfs", ranks=4, microbatches=16, chunks=num_chunks),
    ):
        free, lock = price(schedule, costs)
        whole = costs.forward + costs.input + costs.weight
        assert free == lock == (16 * num_chunks + 3) * whole


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (4, 16), (8, 32)])
def test_one_forward_one_backward_lies_on_the_grid_of_the_formula(ranks, microbatches):
    ticks = to_lock_step(one_f_one_b(ranks, microbatches))
    for rank, tick, action in enumerate_ticks(ticks):
        late = rank if action.op is Op.F else 2 * (ranks - 1) - rank
        assert tick == action.microbatch + late
    assert peak_activations(ticks.schedule) == tuple(2 * (ranks - 1 - r) + 1 for r in range(ranks))


def test_zero_bubble_pays_the_bubble_of_lock_step():
    for ranks, microbatches in ((4, 16), (8, 32)):
        _, lock = price(zero_bubble_h1(ranks, microbatches), ONES)
        assert lock == 3 * microbatches + 2 * (ranks - 1)  # formulas.md: (p - 1) (F + I)


def test_gpipe_stays_gpipe():
    ticks = to_lock_step(gpipe(4, 8))
    assert peak_activations(ticks.schedule) == (8, 8, 8, 8)


@settings(max_examples=150, deadline=None)
@given(drafts(), st.sampled_from([ONES, LIKE_MODELS]))
def test_any_schedule_is_run_whole_and_in_its_order(draft, costs):
    schedule = random_schedule(draft)
    ticks = check_ticks(to_lock_step(schedule, costs))
    check(ticks.schedule)
    for rank in range(len(schedule.programs)):
        program, old = (
            [a for r, a in enumerate_actions(s) if r == rank] for s in (ticks.schedule, schedule)
        )
        for kind in ((Op.F,), (Op.B, Op.I), (Op.W,)):
            assert [a for a in program if a.op in kind] == [a for a in old if a.op in kind]
        for forward in (a for a in old if a.op is Op.F):
            before = [a for a in program[: program.index(forward)] if a.op in (Op.B, Op.I)]
            assert set(before) <= set(old[: old.index(forward)])


@settings(max_examples=100, deadline=None)
@given(drafts(), st.integers(0, 2))
def test_a_rank_never_holds_more_than_it_may(draft, spare):
    schedule = random_schedule(draft)
    ticks = check_ticks(to_lock_step(schedule, spare=spare))
    for peak, cap in zip(peak_activations(ticks.schedule), peak_activations(schedule), strict=True):
        assert peak <= cap + spare


@settings(max_examples=150, deadline=None)
@given(drafts())
def test_tables_can_be_run_and_nothing_is_overwritten_before_it_is_read(draft):
    schedule = random_schedule(draft)
    ticks = to_lock_step(schedule)
    assert run_tables(tick_tables(ticks), schedule) == {
        action for _, _, action in enumerate_ticks(ticks)
    }


def completed_chunks(loops: Sequence[TickTables]) -> list[set[int]]:
    """Returns for each loop the chunks of which a residency of backwards ends in it."""
    return [
        {
            chunk
            for ends, at in zip(loop.backward.ends_residency, loop.backward.chunk, strict=True)
            for end, chunk in zip(ends, at, strict=True)
            if end == 1
        }
        for loop in loops
    ]


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 8), (4, 4), (4, 3), (3, 8)])
@pytest.mark.parametrize("chunks", [1, 2, 7, 8, 9, 16])
@pytest.mark.parametrize("in_halves", [False, True])
def test_all_forwards_before_all_backwards_run_in_loops(ranks, microbatches, chunks, in_halves):
    schedule = build("looped_bfs", ranks=ranks, microbatches=microbatches, chunks=chunks)
    ticks = to_lock_step(schedule)
    whole = tick_tables(ticks)
    loops = tick_loops(whole, in_halves=in_halves)
    assert run_loops(loops, schedule) == {action for _, _, action in enumerate_ticks(ticks)}
    halves = 2 if in_halves and chunks >= 8 else 1
    assert [loop.forward.is_idle for loop in loops] == [False] * halves + [True] * halves
    assert sum(len(loop.forward.microbatch) for loop in loops) <= len(whole.forward.microbatch) + 1
    assert completed_chunks(loops) == [set(loop.chunks) for loop in loops]
    assert sorted(chunk for loop in loops for chunk in loop.chunks) == [*range(chunks)]
    stored = [loop.num_slots["residuals_for_weight"] for loop in loops[:halves]]
    assert sum(stored) <= microbatches * chunks + (ranks - 1) * (halves - 1)


def check_loops(schedule: Schedule, *, in_halves: bool) -> int:
    """Runs the loops of a schedule, and returns how many there are."""
    ticks = to_lock_step(schedule)
    loops = tick_loops(tick_tables(ticks), in_halves=in_halves)
    assert run_loops(loops, schedule) == {action for _, _, action in enumerate_ticks(ticks)}
    if len(loops) > 1:
        assert completed_chunks(loops) == [set(loop.chunks) for loop in loops]
    return len(loops)


@settings(max_examples=100, deadline=None)
@given(drafts(), st.booleans())
def test_loops_run_any_schedule(draft, in_halves):
    check_loops(random_schedule(draft), in_halves=in_halves)


@settings(max_examples=40, deadline=None)
@given(
    st.builds(
        Draft, st.integers(1, 3), st.integers(7, 9), st.integers(1, 4), st.integers(0, 2**32)
    ),
    st.booleans(),
)
def test_loops_are_cut_where_ranks_leave_the_later_chunks(draft, mirrored):
    schedule = forwards_first(draft, mirrored=mirrored)
    assert check_loops(schedule, in_halves=False) == 2
    count = check_loops(schedule, in_halves=True)
    assert count in (2, 4)
    if draft.ranks == 1 and mirrored:
        assert count == (4 if draft.chunks >= 8 else 2)


def test_loops_are_whole_where_ranks_come_back_to_a_chunk():
    draft = Draft(ranks=2, chunks=8, microbatches=3, seed=0)
    assert check_loops(forwards_first(draft, mirrored=True), in_halves=True) == 4
    counts = {
        check_loops(forwards_first(draft._replace(seed=seed), mirrored=False), in_halves=True)
        for seed in range(8)
    }
    assert 2 in counts


def test_buffers_are_as_large_as_the_peak_of_the_grid():
    for name in ("1f1b", "gpipe", "interleaved_1f1b"):
        ticks = to_lock_step(build(name, ranks=4, microbatches=16))
        sizes = tick_tables(ticks).num_slots
        assert (
            sizes["residuals_for_backward"]
            == sizes["residuals_for_weight"]
            == max(peak_activations(ticks.schedule))
        )
        assert sizes["inputs"] == 1 and sizes["wgrad_residuals"] == 0


def test_activations_are_handed_on_where_the_placement_needs_it():
    straight, v = tick_tables(to_lock_step(one_f_one_b(4, 8))), tick_tables(to_lock_step(zbv(4, 8)))
    assert (set(straight.activation_arrivals), set(straight.cotangent_arrivals)) == ({1}, {3})
    assert (set(v.activation_arrivals), set(v.cotangent_arrivals)) == ({0, 1, 3}, {0, 1, 3})


def test_dualpipe_costs_little_more_in_lock_step_than_without():
    assert price(dualpipe(4, 8), ONES) == (26, 27)
    assert price(dualpipe(8, 16), ONES) == (54, 58)


def test_dualpipe_sends_both_ways_and_copies_weights_in_one_permutation():
    tables = tick_tables(to_lock_step(dualpipe(4, 8)))
    assert set(tables.activation_arrivals) == set(tables.cotangent_arrivals) == {1, 3}
    assert tables.copies == WeightCopies(
        chunks=((0, 0, -1, -1), (-1, -1, 0, 0)),
        rounds=(CopyRound((3, 2, 1, 0), (0, 0, 0, 0), (1, 1, 0, 0)),),
    )
    assert tick_tables(to_lock_step(zbv(4, 8))).copies is None


@settings(max_examples=100, deadline=None)
@given(drafts(copies=3))
def test_every_copy_is_received_once_and_every_stage_is_stored_once(draft):
    schedule = random_schedule(draft)
    stored, copies = rank_and_chunk_by_stage(schedule), tick_tables(to_lock_step(schedule)).copies
    assert sorted(stored) == list(range(schedule.num_stages))
    assert len(set(stored.values())) == schedule.num_stages
    run = [list(stages_of_rank(schedule, rank)) for rank in range(draft.ranks)]
    if copies is None:
        assert sum(map(len, run)) == schedule.num_stages
        return
    held = [
        {c: stages[c] for c in range(len(stages)) if copies.chunks[c][rank] >= 0}
        for rank, stages in enumerate(run)
    ]
    stage_at = {place: stage for stage, place in stored.items()}
    for sent in copies.rounds:
        assert sorted(sent.receivers) == list(range(draft.ranks))
        for rank, receiver in enumerate(sent.receivers):
            if (chunk := sent.copied_chunks[receiver]) >= 0:
                assert chunk not in held[receiver]
                held[receiver][chunk] = stage_at[RankAndChunk(rank, sent.stored_chunks[rank])]
    assert [dict(enumerate(stages)) for stages in run] == held


@pytest.mark.parametrize(("ranks", "slices"), [(1, 2), (2, 3), (4, 2), (4, 4), (8, 3)])
def test_slices_keep_their_order_and_hold_less_than_whole_microbatches(ranks, slices):
    ticks = check_ticks(to_lock_step(seq1f1b(ranks, 8, num_slices=slices)))
    check(ticks.schedule)
    whole = tick_tables(to_lock_step(one_f_one_b(ranks, 8))).num_slots
    sizes = tick_tables(ticks).num_slots
    if ranks >= 4:
        assert sizes["residuals_for_backward"] < slices * whole["residuals_for_backward"]
    # Keys and values are stored once per microbatch, and one cotangent is enough.
    assert sizes["past"] <= -(-sizes["residuals_for_backward"] // slices) + 1
    assert sizes["past_cotangents"] == 1


def test_slices_in_the_wrong_order_are_refused():
    schedule = parse("0F0s0 0F0s1 0B0s1 0B0s0")
    assert check_ticks(Ticks(schedule, ((0, 1, 1, 2),)))
    late = parse("0F0s1 0F0s0 0B0s1 0B0s0")
    with pytest.raises(ScheduleError, match="0F0s0"):
        check_ticks(Ticks(late, ((0, 1, 1, 2),)))


def test_slices_of_a_microbatch_on_two_ranks_are_refused():
    schedule = parse("0F0s0 1F0s1 1B0s1 0B0s0\n1F0s0 0F0s1 0B0s1 1B0s0")
    ticks = Ticks(schedule, ((0, 3, 3, 6), (1, 2, 4, 5)))
    with pytest.raises(ScheduleError, match="run those of a stage on one rank"):
        check_ticks(ticks)


def test_a_forward_of_a_slice_that_is_missing_is_named():
    forwards = parse("0F0s0 0F0s1 0F1s0 0F1s1")
    assert check_ticks(Ticks(forwards, ((0, 1, 2, 3),)))
    with pytest.raises(ScheduleError, match="No rank runs 0F1s0"):
        check_ticks(Ticks(parse("0F0s0 0F0s1 0F1s1"), ((0, 1, 2),)))


def every_grid(schedule: Schedule, costs: Costs) -> Ticks:
    """`to_lock_step` without giving anything up: every lag at every spare, and then the choice."""
    peaks, orders = peak_activations(schedule), rank_orders(schedule, costs)

    def cheapest(spare: int) -> Grid:
        caps = [peak + spare for peak in peaks]
        grids = [fill_grid(orders, caps, lag).grid for lag in candidate_lags(schedule)]
        return min((grid for grid in grids if grid), key=lambda grid: grid.makespan)

    *lean, most = map(cheapest, candidate_spares(schedule))
    enough = max(most.makespan, makespan(simulate(schedule, costs)))
    return ticks_from_grid(schedule, next((grid for grid in lean if grid.makespan <= enough), most))


@settings(max_examples=60, deadline=None)
@given(drafts(), st.sampled_from([ONES, LIKE_MODELS, Costs(0.1, 0.2, 0.1, 0.03), Costs(1, 1, 0)]))
def test_what_is_given_up_early_would_not_have_been_chosen(draft, costs):
    schedule = random_schedule(draft)
    assert to_lock_step(schedule, costs) == every_grid(schedule, costs)


@pytest.mark.parametrize("name", ["zero_bubble_h1", "zbv", "v_half"])
def test_what_is_given_up_early_would_not_have_been_chosen_of_larger_ones(name):
    schedule = build(name, ranks=5, microbatches=12)
    for costs in (LIKE_MODELS, Costs(1 / 3, 0.7, 0.3)):
        assert to_lock_step(schedule, costs) == every_grid(schedule, costs)


def test_a_makespan_of_a_grid_is_that_of_its_ticks():
    costs = Costs(0.1, 0.2, 0.1, 0.03)
    for name in ("1f1b", "zbv"):
        schedule = build(name, ranks=4, microbatches=8)
        grid = fill_grid(rank_orders(schedule, costs), [8] * 4, 1).grid
        assert grid and grid.makespan == makespan(
            simulate_ticks(ticks_from_grid(schedule, grid), costs)
        )


@settings(max_examples=60, deadline=None)
@given(drafts(), st.integers(0, 3), st.sampled_from([ONES, LIKE_MODELS]))
def test_a_cap_is_kept_and_no_spare_within_it_is_faster(draft, more, costs):
    schedule = random_schedule(draft)
    peaks = peak_activations(schedule)
    cap = max(peaks) + more
    ticks = check_ticks(to_lock_step(schedule, costs, memory_cap=cap))
    assert max(peak_activations(ticks.schedule)) <= cap
    each = [peak + more for peak in peaks]
    of_ranks = check_ticks(to_lock_step(schedule, costs, memory_cap=each))
    for peak, most in zip(peak_activations(of_ranks.schedule), each, strict=True):
        assert peak <= most
    spared = makespan(simulate_ticks(to_lock_step(schedule, costs, spare=more), costs))
    assert makespan(simulate_ticks(of_ranks, costs)) <= spared


def test_a_cap_that_costs_nothing_changes_nothing():
    for name in ("1f1b", "zbv", "interleaved_zero_bubble"):
        schedule = build(name, ranks=4, microbatches=16)
        free = to_lock_step(schedule)
        most = max(peak_activations(free.schedule))
        capped = makespan(simulate_ticks(to_lock_step(schedule, memory_cap=2 * most), ONES))
        assert capped <= makespan(simulate_ticks(free, ONES))


def test_a_cap_below_the_order_of_the_schedule_is_refused():
    with pytest.raises(ValueError, match="is 3 activations for rank 0, and the order of the sch"):
        to_lock_step(one_f_one_b(4, 8), memory_cap=3)
    with pytest.raises(ValueError, match=r"is 1 activations for rank 2.* holds 2 there"):
        to_lock_step(one_f_one_b(4, 8), memory_cap=[4, 3, 1, 1])
    with pytest.raises(ValueError, match="`memory_cap` has 2 entries for 4 ranks"):
        to_lock_step(one_f_one_b(4, 8), memory_cap=[4, 4])


def test_costs_that_are_not_one_per_stage_are_refused():
    with pytest.raises(ValueError, match="`input` has 1 entries for 2 stages"):
        to_lock_step(gpipe(2, 2), Costs(input=(1,)), spare=0)


def test_a_negative_spare_is_refused():
    with pytest.raises(ValueError, match="`spare` is -1"):
        to_lock_step(gpipe(2, 2), spare=-1)


def test_ranks_with_different_numbers_of_stages_are_refused():
    uneven = check(parse("0F0 1F0 1B0 0B0\n2F0 2B0"))
    with pytest.raises(ValueError, match="Ranks hold 2, 1 stages"):
        tick_tables(to_lock_step(uneven))
    shared = check(parse("0F0 1F0 0F1 1B0 0B0 0B1\n2F0 2B0 1F1 2F1 2B1 1B1"))
    with pytest.raises(ValueError, match="Ranks store 2, 1 stages"):
        tick_tables(to_lock_step(shared))


def test_a_grid_whose_hand_over_comes_too_late_is_refused():
    schedule = check(parse("0F0 0B0\n1F0 1B0"))
    with pytest.raises(ScheduleError, match=r"Rank 1 runs 1F0 in tick 0, but 0F0 runs on rank 0"):
        check_ticks(Ticks(schedule, ((0, 1), (0, 0))))
    with pytest.raises(ScheduleError, match=r"Rank 0 runs 0B0 in tick 0"):
        check_ticks(Ticks(schedule, ((1, 0), (2, 2))))


def test_lock_step_is_never_cheaper_than_it_would_be_to_wait_for_less():
    for name in FAMILIES:
        if name == "circular":
            continue
        schedule = build(name, ranks=4, microbatches=8)
        ticks = to_lock_step(schedule, LIKE_MODELS)
        in_order = makespan(simulate(without_fused_pairs(ticks.schedule), LIKE_MODELS))
        assert makespan(simulate_ticks(ticks, LIKE_MODELS)) >= in_order
