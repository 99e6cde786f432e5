"""Placements: every stage has one place, and back."""

import pytest

from jaxpipe.schedules import build
from jaxpipe.schedules.language import (
    loop_rank_and_chunk,
    loop_stage,
    stages_of_rank,
    v_rank_and_chunk,
    v_stage,
)


@pytest.mark.parametrize(
    ("stage_of", "inverse"),
    [(loop_stage, loop_rank_and_chunk), (v_stage, v_rank_and_chunk)],
)
def test_every_stage_has_one_place(stage_of, inverse):
    places = {stage_of(rank, chunk, 4): (rank, chunk) for rank in range(4) for chunk in range(3)}
    assert sorted(places) == list(range(12))
    assert all(inverse(stage, 4) == place for stage, place in places.items())


def test_a_loop_goes_round_and_a_v_turns_back():
    assert [loop_stage(rank, 1, 4) for rank in range(4)] == [4, 5, 6, 7]
    assert [v_stage(rank, 1, 4) for rank in range(4)] == [7, 6, 5, 4]
    assert [v_stage(rank, 2, 4) for rank in range(4)] == [8, 9, 10, 11]


def test_builders_place_their_stages_so():
    assert stages_of_rank(build("interleaved_1f1b", ranks=4, microbatches=8), 1) == (1, 5)
    assert stages_of_rank(build("v_half", ranks=4, microbatches=8), 1) == (1, 6)
