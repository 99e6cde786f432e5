"""Placements: every stage has one place, and back."""

import pytest

from jaxpipe.schedules import build
from jaxpipe.schedules.language import PLACEMENTS, rank_of_each_stage, stages_of_rank


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_stage_has_one_place(name: str):
    stage_of = PLACEMENTS[name].stage
    places = {stage_of(rank, chunk, 4): rank for rank in range(4) for chunk in range(3)}
    assert sorted(places) == list(range(12))
    ranks = rank_of_each_stage(name, 4, 3)
    assert all(ranks[stage] == rank for stage, rank in places.items())


def test_a_loop_goes_round_and_a_v_turns_back():
    loop, v = (PLACEMENTS[name].stage for name in ("loop", "v"))
    assert [loop(rank, 1, 4) for rank in range(4)] == [4, 5, 6, 7]
    assert [v(rank, 1, 4) for rank in range(4)] == [7, 6, 5, 4]
    assert [v(rank, 2, 4) for rank in range(4)] == [8, 9, 10, 11]
    assert rank_of_each_stage("v", 4, 3) == (0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3)


def test_builders_place_their_stages_so():
    assert stages_of_rank(build("interleaved_1f1b", ranks=4, microbatches=8), 1) == (1, 5)
    assert stages_of_rank(build("v_half", ranks=4, microbatches=8), 1) == (1, 6)
