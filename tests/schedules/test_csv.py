"""Torch's CSV: what is written reads back, and what cannot run is refused with its row and cell."""

from pathlib import Path

import pytest
from hypothesis import given, settings

from jaxpipe.schedules import ScheduleError, build, from_csv, read_csv, to_csv, write_csv
from jaxpipe.schedules.builders import one_f_one_b

from .legal import Case, cases, made

REFERENCE = Path(__file__).parent / "reference"


def test_a_row_is_a_rank():
    assert to_csv(one_f_one_b(2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@given(cases())
@settings(max_examples=40, deadline=None)
def test_what_is_written_reads_back(case: Case):
    schedule = made(case)
    assert from_csv(to_csv(schedule)) == schedule


def test_a_file_reads_back(tmp_path: Path):
    schedule = build("dualpipev", ranks=2, microbatches=4)
    write_csv(schedule, tmp_path / "s.csv")
    assert read_csv(tmp_path / "s.csv") == schedule


def test_torchs_own_file_reads():
    # Written by torch 2.13: idle cells are empty, and a comment says where it comes from.
    assert read_csv(REFERENCE / "zbv.csv") == build("zbv", ranks=4, microbatches=8)
    assert read_csv(REFERENCE / "dualpipev.csv") == build("dualpipev", ranks=4, microbatches=8)


def test_idle_cells_comments_blank_lines_and_line_ends_of_windows_are_skipped():
    text = "# from torch\r\n0F0,0F1,,,0B0,0B1\r\n\r\n, 1F0 ,1B0,1F1,1B1\r\n"
    assert from_csv(text) == one_f_one_b(2, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# x\n0F0,0B0\n1F0,,1X0\n", "Row 3, cell 3: '1X0' is not an action. Write stage"),
        ("0F0,0UNSHARD\n", "Row 1, cell 2: '0UNSHARD' is not an action"),
        ("# nothing\n", "The schedule has no actions"),
        ("", "The schedule has no actions"),
    ],
)
def test_a_cell_that_is_no_action_is_named(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        from_csv(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0\n", r"No rank runs 1I0 \(or 1B0\). Add it to rank 1"),
        ("0F0,0B0,0F0\n", "Rank 0 runs 0F0, but rank 0 has already run 0F0"),
        ("0F0,0B0\n1B0,1F0\n", "rank 1 waits at 1B0 for 1F0"),
    ],
)
def test_a_file_that_cannot_run_is_refused_naming_file_and_action(
    tmp_path: Path, text: str, message: str
):
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(ScheduleError, match=message) as caught:
        read_csv(tmp_path / "bad.csv")
    assert str(caught.value).startswith(str(tmp_path / "bad.csv"))
