"""Several runs on one page: curves over a common axis, and the settings that differ."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from browsers import browser as browser
from browsers import opened
from jaxpipe.cli import main
from jaxpipe.report import read_run
from jaxpipe.report.comparison import (
    comparison_data,
    differing_settings,
    render_comparison,
    run_labels,
)

from .written import NOW, usual, write_run, write_starts


def faster(step: int) -> dict[str, float]:
    found = usual(step)
    seconds = found["step_time_seconds"] / 2
    return found | {"step_time_seconds": seconds, "tokens_per_second": 4096 / seconds}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """Two runs: the second is longer, with batches of twice the tokens in half of the time."""
    base = tmp_path_factory.mktemp("runs")
    changed = {"run_name": "fast", "learning_rate": 3e-3, "steps": 1000}
    runs = [
        write_run(base / "slow", settings={"run_name": "slow"}),
        write_run(base / "fast", settings=changed, metrics=faster, steps=1000),
    ]
    write_starts(runs[1], {"first_step": 1}, {"first_step": 401})
    return runs


def test_settings_that_differ_are_a_row_with_the_value_of_every_run(folders):
    rows = differing_settings([read_run(folder) for folder in folders])
    found = {row[0].key: [setting.value for setting in row] for row in rows}
    assert found == {"learning_rate": ["0.001", "0.003"], "steps": ["60", "1000"]}


def test_a_key_that_an_older_version_did_not_have_differs(folders, tmp_path: Path):
    folder = write_run(tmp_path / "old", settings={"run_name": "slow"})
    lines = (folder / "config.yml").read_text().splitlines()
    kept = [line for line in lines if not line.startswith("jax_cache_dir")]
    (folder / "config.yml").write_text("\n".join(kept))
    runs = [read_run(folder), read_run(folders[0])]
    (row,) = differing_settings(runs)
    assert [(s.key, s.value) for s in row] == [("jax_cache_dir", ""), ("jax_cache_dir", "auto")]
    assert run_labels(runs) == [str(folder), str(folders[0])]


def test_curves_have_steps_tokens_and_time_without_compilation(folders):
    data = comparison_data([read_run(folder) for folder in folders], ["slow", "fast"])
    assert [axis["name"] for axis in data["axes"]] == ["step", "tokens", "time"]
    slow, fast = next(c for c in data["charts"] if c["metric"] == "loss")["series"]
    assert [slow["run"], fast["run"]] == [0, 1]
    tokens = data["steps"][slow["x"]["tokens"]]
    assert list(tokens) == [2048 * step for step in range(1, 61)]
    minutes = data["steps"][slow["x"]["time"]]
    assert minutes[-1] == pytest.approx(0.5, rel=0.05)  # 30 s of the first step are compilation
    assert len(fast["mean"]) == 500 == len(data["steps"][fast["x"]["step"]])
    speed = next(c for c in data["charts"] if c["metric"] == "step_time_seconds")
    assert speed["series"][0]["mean"][0] is None
    assert max(speed["series"][0]["mean"][1:]) < 0.6


def test_without_metrics_of_speed_the_axis_is_steps(folders, tmp_path: Path):
    folder = write_run(tmp_path / "run", metrics=lambda step: {"loss": 1 / step})
    runs = [read_run(folder), read_run(folders[0])]
    page = render_comparison(runs, now=NOW)
    assert re.findall(r'<option value="(\w+)"', page) == ["step"]
    assert "Time in steps is without" not in page


def test_the_command_writes_one_page_and_refuses_what_is_for_one_run(folders, capsys):
    names = [str(folder) for folder in folders]
    assert main(["report", *names]) == 0
    output = folders[0].parent / "comparison.html"
    assert capsys.readouterr().out.startswith(f"{output}: ")
    assert "<h1>2 runs</h1>" in output.read_text()
    for words, message in (
        ([*names, "--compile"], "`--compile` is for a page on one run, and there are 2."),
        ([names[0], names[0]], "has a folder twice"),
        (names * 7, "has 14 runs, and a page shows up to 12"),
    ):
        assert main(["report", *words]) == 2
        assert message in capsys.readouterr().err


@pytest.fixture
def shown(browser: Any, folders: list[Path], request: pytest.FixtureRequest, tmp_path: Path):
    width, scheme = getattr(request, "param", (1400, "light"))
    file = tmp_path / "comparison.html"
    page = render_comparison([read_run(folder) for folder in folders], now=NOW)
    file.write_text(page, encoding="utf-8")
    with opened(browser, file, width, scheme) as tab:
        yield tab


@pytest.mark.parametrize("shown", [(420, "dark")], indirect=True, ids=["420-dark"])
def test_on_a_narrow_window_nothing_is_wider_than_it(shown: Any):
    assert shown.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    outside = shown.eval_on_selector_all(
        "main *:not(.scroll *)",
        "all => all.filter(e => e.getBoundingClientRect().right > innerWidth + 1).length",
    )
    assert outside == 0
    widths = shown.eval_on_selector_all(
        "#curves > .charts .chart:first-child path.line", "all => all.map(p => p.getBBox().width)"
    )
    assert len(widths) == 2
    assert widths[1] > 250 > widths[0] > 10  # 1000 steps and 60


def test_axis_smoothing_and_csv_can_be_chosen(shown: Any):
    loss = shown.locator(".chart").first
    lines = loss.locator("path.line")
    by_step = [lines.nth(i).get_attribute("d") for i in range(2)]
    shown.select_option("#axis", "tokens")
    by_tokens = [lines.nth(i).get_attribute("d") for i in range(2)]
    assert by_tokens[0] != by_step[0]  # half as many tokens a step
    shown.fill("#smoothing", "0.9")
    assert lines.nth(1).get_attribute("d") != by_tokens[1]
    shown.fill("#smoothing", "0")
    shown.select_option("#axis", "step")
    assert [lines.nth(i).get_attribute("d") for i in range(2)] == by_step

    assert loss.locator(".readout").inner_text().startswith("at the end slow 2.067 fast 2.00")
    box = loss.locator(".curve").bounding_box()
    shown.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
    assert " slow ended fast 2.00" in loss.locator(".readout").inner_text()

    with shown.expect_download() as download:
        loss.locator(".csv").click()
    assert download.value.suggested_filename == "loss.csv"
    rows = list(csv.DictReader(Path(download.value.path()).read_text().splitlines()))
    assert [*rows[0]] == ["run", "metric", "step", "tokens", "time_min", "value"]
    assert len(rows) == 60 + 500
    assert (rows[1]["run"], rows[1]["step"], rows[1]["tokens"]) == ("slow", "2", "4096")
    assert float(rows[1]["value"]) == 4
