"""What a family says about its schedules is what their actions and their ticks have."""

from collections.abc import Iterator
from itertools import groupby

import pytest

from jaxpipe.schedules import FAMILIES, Costs, FusedPair, Schedule, build
from jaxpipe.schedules.language import (
    actions_of,
    rank_of_each_stage,
    ranks_by_stage,
    splits_backwards,
)
from jaxpipe.schedules.lock_step import tick_tables, to_lock_step


def schedules_of(name: str) -> Iterator[tuple[int, int, int, Schedule]]:
    """Yields ranks, microbatches, chunks and schedules of small counts that the family takes."""
    family = FAMILIES[name]
    for ranks in (1, 2, 3, 4, 6):
        for microbatches in sorted({1, 2, 5, ranks, 2 * ranks - 1, 2 * ranks, 3 * ranks}):
            for chunks in (1, 2, 3) if "chunks" in family.takes else (family.default_chunks,):
                given = {"chunks": chunks, "slices": 1}
                given = {name: given[name] for name in given if name in family.takes}
                try:
                    schedule = build(name, ranks=ranks, microbatches=microbatches, **given)
                except ValueError:  # tests of the builders say which counts they refuse
                    continue
                yield ranks, microbatches, chunks, schedule


@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_hold_the_stages_that_the_placement_of_the_family_gives_them(name: str):
    family = FAMILIES[name]
    for ranks, _, chunks, schedule in schedules_of(name):
        if family.placement == "both_ways":
            stated = {stage: {stage, ranks - 1 - stage} for stage in range(ranks)}
        else:
            rank_of = rank_of_each_stage(family.placement, ranks, chunks)
            stated = {stage: {rank} for stage, rank in enumerate(rank_of)}
        assert {stage: {*held} for stage, held in ranks_by_stage(schedule).items()} == stated


@pytest.mark.parametrize("name", FAMILIES)
def test_the_default_chunks_are_those_that_the_builder_has(name: str):
    schedule = build(name, ranks=4, microbatches=8)
    assert schedule.num_stages == 4 * FAMILIES[name].default_chunks


@pytest.mark.parametrize("name", FAMILIES)
def test_microbatches_must_be_a_multiple_of_ranks_only_where_the_family_says_so(name: str):
    if FAMILIES[name].ranks_divide_microbatches:
        with pytest.raises(ValueError, match="no multiple of 4 ranks"):
            build(name, ranks=4, microbatches=10)
    else:
        build(name, ranks=4, microbatches=10)


@pytest.mark.parametrize("name", FAMILIES)
def test_backwards_are_split_and_pairs_fused_only_where_the_family_says_so(name: str):
    family, some_pair = FAMILIES[name], False
    for _, _, _, schedule in schedules_of(name):
        assert splits_backwards(schedule) == family.splits_backward
        steps = [step for program in schedule.programs for step in program]
        some_pair |= any(isinstance(step, FusedPair) for step in steps)
    assert some_pair == family.fuses_pairs


@pytest.mark.parametrize("name", FAMILIES)
def test_a_breadth_first_rank_runs_every_chunk_once_per_direction(name: str):
    if not FAMILIES[name].is_breadth_first:
        return
    for _, _, chunks, schedule in schedules_of(name):
        for program in schedule.programs:
            actions = [action for step in program for action in actions_of(step)]
            runs = [key for key, _ in groupby((a.stage, a.op) for a in actions)]
            assert len(runs) == 2 * chunks


@pytest.mark.parametrize("name", FAMILIES)
def test_lock_step_stores_as_many_residuals_as_the_family_says(name: str):
    family = FAMILIES[name]
    for ranks, microbatches, chunks, schedule in schedules_of(name):
        slots = tick_tables(to_lock_step(schedule, Costs())).num_slots
        stored = max(slots["residuals_for_backward"], slots["residuals_for_weight"])
        stated = family.most_live(ranks, microbatches, chunks)
        counts = f"{ranks} ranks, {microbatches} microbatches, {chunks} chunks"
        assert stored == stated if family.is_live_exact else stored <= stated, counts
