"""`jaxpipe schedule`, called as a shell calls it."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from jaxpipe.cli import main
from jaxpipe.schedules import FAMILIES, Costs, build, makespan, read_csv, simulate

COUNTS = ["--ranks", "4", "--microbatches", "8"]


def run(*argv: str) -> int:
    return main(["schedule", *argv])


def test_list_names_every_family(capsys):
    assert run("list") == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_export_writes_what_check_accepts(name: str, tmp_path: Path, capsys):
    file = tmp_path / "schedule.csv"
    assert run("export", name, *COUNTS, "--csv", str(file)) == 0
    assert read_csv(file) == build(name, ranks=4, microbatches=8)
    assert run("check", str(file)) == 0
    assert "complete and free of deadlock" in capsys.readouterr().out


def test_export_without_a_file_prints(capsys):
    assert run("export", "1f1b", "--ranks", "2", "--microbatches", "2") == 0
    assert capsys.readouterr().out == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_show_draws_the_timeline_and_writes_pictures(tmp_path: Path, capsys):
    svg, trace = tmp_path / "s.svg", tmp_path / "s.json"
    assert run("show", "1f1b", "--ranks", "2", "--microbatches", "2", "--svg", str(svg),
               "--trace", str(trace)) == 0  # fmt: skip
    assert "rank 0  0F0 0F1 .   .   0B0 --- .   0B1 ---\n" in capsys.readouterr().out
    ElementTree.parse(svg)
    assert json.loads(trace.read_text())["traceEvents"]


def test_show_fits_the_width_of_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    counts = ("--ranks", "4", "--microbatches", "8")
    assert run("show", "1f1b", *counts) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) > 100  # is no terminal
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run("show", "1f1b", *counts) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


def test_show_writes_a_page_of_two_schedules(tmp_path: Path, capsys):
    page, csv = tmp_path / "s.html", tmp_path / "s.csv"
    assert run("export", "1f1b", *COUNTS, "--csv", str(csv)) == 0
    for shown, other in (("zbv", "1f1b"), ("seq1f1b", "interleaved_1f1b")):
        assert run("show", shown, *COUNTS, "--html", str(page), "--compare", other) == 0
        assert f"<h1>{shown}, {other}</h1>" in page.read_text()
    assert run("show", str(csv), "--html", str(page), "--compare", "zbv", "--lock-step") == 0
    assert '"name":"zbv","about":"4 ranks, 8 stages, 8 microbatches' in page.read_text()
    capsys.readouterr()
    assert run("show", "zbv", *COUNTS, "--compare", "1f1b") == 2
    assert (
        "`--compare` adds a schedule to a page. Give `--html FILE` too." in capsys.readouterr().err
    )
    costs = ("--costs", "1/2/1/2,1,1")
    assert run("show", "1f1b", *COUNTS, *costs, "--html", str(page), "--compare", "zbv") == 2
    assert "F of `--costs` has 4 entries for 8 stages" in capsys.readouterr().err


def test_export_takes_no_costs_as_a_file_of_actions_has_none(capsys):
    with pytest.raises(SystemExit):
        run("export", "1f1b", *COUNTS, "--costs", "1,2,3")
    assert "unrecognized arguments: '--costs'" in capsys.readouterr().err


def test_lock_step_is_drawn_and_has_its_price(capsys):
    assert run("show", "1f1b", "--ranks", "2", "--microbatches", "2", "--lock-step") == 0
    assert "rank 0  0F0 0F1 .   .   0B0 --- .   0B1 ---\n" in capsys.readouterr().out
    options = ("simulate", "zero_bubble_h1", *COUNTS, "--json")
    makespans = []
    for more in ((), ("--lock-step",)):
        assert run(*options, *more) == 0
        makespans.append(json.loads(capsys.readouterr().out)["makespan"])
    assert makespans == [27, 28]


def test_simulate_prints_json_of_a_name_or_a_file(tmp_path: Path, capsys):
    file = tmp_path / "schedule.csv"
    assert run("export", "zbv", *COUNTS, "--csv", str(file)) == 0
    assert run("simulate", "zbv", *COUNTS, "--costs", "10,12,8", "--transfer", "1", "--json") == 0
    by_name = json.loads(capsys.readouterr().out)
    assert run("simulate", str(file), "--costs", "10,12,8", "--transfer", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out) == by_name
    assert by_name["peak_activations"] == [8, 8, 8, 8]
    assert run("simulate", "1f1b", *COUNTS, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "ranks": 4, "stages": 4, "microbatches": 8, "slices": 1, "makespan": 33, "bubble": 9,
        "parallelogram_bubble": 9, "busy": [24, 24, 24, 24], "peak_activations": [4, 3, 2, 1],
    }  # fmt: skip


def test_simulate_takes_costs_per_stage(capsys):
    argv = ["--ranks", "2", "--microbatches", "1", "--costs", "1/5,2/6,0.5"]
    assert run("simulate", "1f1b", *argv, "--json") == 0
    assert json.loads(capsys.readouterr().out)["busy"] == [3.5, 11.5]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["show", "1f1", *COUNTS], "There is no schedule '1f1'. Did you mean '1f1b'?"),
        (["show", "1f1b", "--ranks", "4"], "`--microbatches` is missing"),
        (["show", "1f1b", *COUNTS, "--chunks", "2"], "`--chunks` is 2, but 1f1b takes none such"),
        (["simulate", "1f1b", *COUNTS, "--costs", "1,2"], "`--costs` is '1,2'. Give three costs"),
        (
            ["simulate", "1f1b", *COUNTS, "--costs", "1,2,x"],
            "`--costs` has 'x', which is no number",
        ),
        (
            ["simulate", "1f1b", *COUNTS, "--costs", "1/2,1,1"],
            "F of `--costs` has 2 entries for 4 stages",
        ),
        (["check", "nowhere.csv"], "nowhere.csv: no such file"),
        (["show", "nowhere.csv"], "nowhere.csv: no such file"),
    ],
)
def test_what_a_user_did_wrong_is_one_line_and_exit_code_2(argv: list[str], message: str, capsys):
    assert run(*argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"jaxpipe: error: {message}")
    assert captured.err.count("\n") == 1


def test_a_file_has_its_own_counts(tmp_path: Path, capsys):
    file = tmp_path / "s.csv"
    file.write_text("0F0,0B0\n")
    assert run("show", str(file), "--ranks", "2") == 2
    assert "is a file and has its counts. Leave out --ranks." in capsys.readouterr().err


def test_a_deadlock_is_shown_where_it_is(tmp_path: Path, capsys):
    file = tmp_path / "bad.csv"
    file.write_text("0F0,0B0\n1B0,1F0\n")
    assert run("check", str(file)) == 2
    assert "  1B0 <- here 1F0\n" in capsys.readouterr().err


def test_no_jax_is_imported():
    program = """
import sys
from jaxpipe.cli import main
assert main(["schedule", "show", "zbv", "--ranks", "2", "--microbatches", "4"]) == 0
assert "jax" not in sys.modules and "numpy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_search_prints_the_gap_to_the_bound_and_writes_the_schedule(tmp_path: Path, capsys):
    file = tmp_path / "found.csv"
    options = ["--ranks", "2", "--microbatches", "4", "--costs", "10,12,8", "--max-chunks", "1"]
    assert run("search", *options, "--csv", str(file)) == 0
    printed = capsys.readouterr().out
    assert "0.00% above the bound" in printed and "peak activations  2\n" in printed
    assert makespan(simulate(read_csv(file), Costs(10, 12, 8))) == 134
    assert run("search", *options, "--no-barrier", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["bound"] <= figures["step_time"] <= figures["makespan"]
    assert run("search", *options, "--lock-step", "--json") == 0
    assert json.loads(capsys.readouterr().out)["makespan"] >= 134
    assert run("search", *options, "--memory-cap", "0.5") == 2
    assert "`--memory-cap` is 0.5, and the leanest schedule tried" in capsys.readouterr().err
