"""The page of a run, without a browser."""

import json
import math
import re
import time
from collections import Counter
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from jaxpipe import report
from jaxpipe.cli import main
from jaxpipe.report.record import Series, points

from .written import page_of, usual, write_checkpoint, write_run, write_starts

_VOID = {"meta", "br", "rect", "line", "path", "circle"}


class Parsed(HTMLParser):
    """Which elements a page has, with their attributes; fails where tags do not close."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert found
    return json.loads(found[1])


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    """Of a run with everything a run may have."""
    folder = write_run(
        tmp_path_factory.mktemp("run") / "all",
        metrics=lambda step: (
            usual(step)
            | ({"eval_loss": 3 + 1 / step} if step % 20 == 0 else {})
            | {"z_loss": 1e-4, "mfu": 0.4, "skipped": float(step == 30)}
        ),
    )
    write_starts(folder, {"first_step": 1}, {"first_step": 41, "repeated_steps": 5})
    for name in ("60", "40", "20.damaged", "10.incomplete"):
        write_checkpoint(folder, name)
    return page_of(folder)


def test_a_page_is_html_with_headings_tables_and_labels(page: str):
    parsed = Parsed(page)
    tags = Counter(tag for tag, _ in parsed.found)
    assert tags["h1"] == tags["main"] == tags["header"] == 1
    assert tags["caption"] == tags["table"] >= 5
    for heading in ("Warnings", "Curves", "Schedule", "Memory per device", "Checkpoints"):
        assert heading in parsed.words
    for tag, attributes in parsed.found:
        if tag == "svg":
            assert attributes["role"] == "img" and attributes["aria-label"]
        if tag == "th":
            assert attributes["scope"] in ("row", "col")
    labels = [attributes.get("aria-label") or "" for _, attributes in parsed.found]
    assert any("loss goes from 6 to 2.067, between 2.067 and 6." in label for label in labels)
    identities = Counter(a["id"] for _, a in parsed.found if "id" in a)
    assert max(identities.values()) == 1


def test_a_page_needs_nothing_else(page: str):
    without_namespaces = page.replace('xmlns="http://www.w3.org/2000/svg"', "")
    without_namespaces = without_namespaces.replace(
        'createElementNS("http://www.w3.org/2000/svg"', ""
    )
    assert not re.search(
        r"https?:|//\w+\.\w|@import|url\((?!#)|<link|<img|srcset", without_namespaces
    )
    for _, attributes in Parsed(page).found:
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert len(page) < 300_000


def test_every_number_is_a_curve_and_the_main_ones_come_first(page: str):
    data = data_of(page)
    curves = [[series["name"] for series in chart["series"]] for chart in data["charts"]]
    assert curves[0] == ["loss", "eval_loss"]
    assert curves[-2:] == [["z_loss"], ["skipped"]]
    assert ["mfu"] in curves
    evaluated = data["charts"][0]["series"][1]
    assert data["steps"][evaluated["steps"]] == [20, 40, 60]
    assert evaluated["mean"] == [3.05, 3.025, 3.0167]
    assert "More curves (4)" in Parsed(page).words


def test_the_calls_of_a_step_multiply_to_its_batch(tmp_path: Path):
    folder = write_run(tmp_path, settings={"gradient_accumulation_steps": 3})
    words = Parsed(page_of(folder)).words
    assert "Batch 48 × 128 tokens Microbatches 3 calls × 8 × 2 rows" in words


def test_what_a_run_did_is_said(page: str):
    words = Parsed(page).words
    for said in (
        "Finished: 60 steps",
        "8 x cpu",
        "stage 4 × fsdp 2",
        "Microbatches 8 × 2 rows",
        "best 3.017 at step 60",
        "Skipped steps. Weights did not change in step 30.",
        "The run went on once, at step 41; 5 steps came again.",
        "The checkpoint of step 20 is corrupt, quarantined.",
        "The checkpoint of step 10 is incomplete, quarantined.",
        "Bubble 15.8%",
        "40.0% of peak",
    ):
        assert said in words, said
    assert "Slow steps" not in words  # the first step, which compiles, is none
    assert data_of(page)["marks"] == {"restarts": [41], "checkpoints": [60, 40], "bad": [30]}


def test_everything_that_comes_from_files_is_escaped(tmp_path: Path):
    evil = "</script><script>alert(1)</script><b>&\"'"
    folder = write_run(
        tmp_path / "evil",
        settings={"output_dir": evil},
        metrics=lambda step: usual(step) | {evil: math.nan if step == 3 else 1.0},
    )
    write_starts(folder, {"first_step": 1, "device_kind": evil, "time": evil, "jax_version": evil})
    (folder / "config.yml").write_text(
        (folder / "config.yml").read_text().replace("a run", json.dumps(evil))
        + f"\n{json.dumps(evil)}: 1"
    )
    page = page_of(folder)
    assert "alert(1)" in page
    assert "<script>alert" not in page and "<b>" not in page
    assert "</script><script>alert" not in page
    parsed = Parsed(page)
    assert sum(tag == "script" for tag, _ in parsed.found) == 2
    assert data_of(page)["charts"][-1]["series"][0]["name"] == evil
    assert parsed.text.count(evil) >= 3


def test_long_runs_make_small_pages_in_a_few_seconds(tmp_path: Path):
    rng = np.random.default_rng(0)
    noise = rng.normal(size=100_001)

    def metrics(step: int) -> dict[str, float]:
        values = {name: float(f"{v + noise[step] / 9:.6g}") for name, v in usual(step).items()}
        return values | {f"more_{i}": noise[step - i] for i in range(2)}

    folder = write_run(
        tmp_path / "long", settings={"steps": 200_000}, steps=100_000, metrics=metrics
    )
    started = time.process_time()
    page = page_of(folder)
    assert time.process_time() - started < 10
    assert len(page) < 1_000_000
    data = data_of(page)
    assert data["bucket"] == 200
    loss = data["charts"][0]["series"][0]
    assert len(loss["mean"]) == len(loss["low"]) == len(loss["high"]) == 500
    assert all(
        low <= mean <= high
        for low, mean, high in zip(loss["low"], loss["mean"], loss["high"], strict=True)
    )


def test_a_schedule_of_more_actions_than_a_page_can_take_is_not_drawn(tmp_path: Path, monkeypatch):
    folder = write_run(tmp_path)
    assert 'class="schedule"' in page_of(folder)
    monkeypatch.setattr("jaxpipe.report._pictures.MAX_ACTIONS", 4 * 2 * 2 * 8 - 1)
    page = page_of(folder)
    assert 'class="schedule"' not in page
    assert "It has too many actions to be drawn." in page


def test_buckets_have_the_mean_and_the_ends_of_their_finite_values():
    values = np.array([1.0, 3.0, math.nan, 5.0, math.nan, math.inf, 7.0])
    found = points(Series(np.arange(1, 8), values), most=4)
    assert found.steps.tolist() == [1, 3, 5, 7]
    np.testing.assert_array_equal(found.mean, [2, 5, math.nan, 7])
    np.testing.assert_array_equal(found.low, [1, 5, math.nan, 7])
    np.testing.assert_array_equal(found.high, [3, 5, math.nan, 7])


def test_a_run_without_anything_has_a_page(tmp_path: Path):
    folder = write_run(
        tmp_path / "bare",
        settings={
            "pipeline_engine": "none",
            "ici_pipeline_parallelism": 1,
            "num_pipeline_microbatches": 1,
        },
        metrics=lambda step: {"loss": math.nan},
        steps=1,
    )
    (folder / "config.yml").write_text((folder / "config.yml").read_text().replace("a run", "''"))
    words = Parsed(page_of(folder)).words
    assert "Step 1 of 60 is bad: its loss is nan" in words
    assert "The run has no pipeline." in words
    assert "There are none." in words


def test_a_config_of_another_version_is_shown_and_not_planned(tmp_path: Path):
    folder = write_run(tmp_path / "other")
    text = (folder / "config.yml").read_text().replace("steps: 60", "steps: many")
    (folder / "config.yml").write_text(text + "new_key: 3\n")
    words = Parsed(page_of(folder)).words
    assert "This version of jaxpipe does not take it as it is" in words
    assert "new_key 3 no key of this version of jaxpipe" in words


@pytest.mark.parametrize(
    ("age", "checkpoint", "said"),
    [
        (5, False, "At step 20 of 60"),
        (3600, True, "Stopped with a checkpoint at step 20 of 60"),
        (3600, False, "Ended at step 20 of 60"),
    ],
)
def test_a_run_that_is_not_done_runs_or_has_stopped(tmp_path: Path, age, checkpoint, said):
    folder = write_run(tmp_path, steps=20)
    if checkpoint:
        write_checkpoint(folder, "20")
    run = report.read_run(folder)
    now = datetime.fromtimestamp(run.written + age, UTC)
    words = Parsed(page_of(folder, now=now)).words
    assert said in words
    assert bool(re.search(r"about (19|20)\.?\d* s left", words)) == (age == 5)
    assert ("20 steps come again" in words) != checkpoint


TRACE = [
    {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "rank 0, measured"}},
    {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "rank 0, predicted"}},
    *(
        {"ph": "X", "pid": pid, "name": name, "ts": ts, "dur": 2000.0}
        for pid, late in ((0, 1000.0), (1, 0.0))
        for name, ts in (("0F0", 0.0), ("0B0", 2000.0 + late))
    ),
    {"ph": "C", "pid": 0, "name": "live activations", "ts": 0, "args": {"count": 1}},
]


def test_what_a_traced_step_did_stands_beside_its_prediction(tmp_path: Path):
    folder = write_run(tmp_path)
    (folder / "trace_7.json").write_text(json.dumps({"traceEvents": TRACE}))
    words = Parsed(page_of(folder)).words
    assert "Bubble, measured in step 7 20.0%" in words
    assert "Bubble, predicted with the lengths of step 7 0.0%" in words
    (folder / "trace_7.json").write_text('{"traceEvents": [{}]}')
    with pytest.raises(ValueError, match=r"trace_7\.json is no trace of `mpmd_trace_step`"):
        page_of(folder)


def test_the_command_writes_a_page_into_the_run_or_where_it_is_told(tmp_path: Path, capsys):
    folder = write_run(tmp_path / "run")
    assert main(["report", str(folder)]) == 0
    assert "report.html: " in capsys.readouterr().out
    assert Parsed((folder / "report.html").read_text()).words
    elsewhere = tmp_path / "page.html"
    assert main(["report", str(folder), "--output", str(elsewhere)]) == 0
    assert elsewhere.exists()
    assert main(["report", str(folder), "--output", str(tmp_path / "no" / "page.html")]) == 2
    assert "page.html, which cannot be written: " in capsys.readouterr().err


def broken(folder: Path, name: str) -> None:
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    match name:
        case "no metrics":
            file.unlink()
        case "no line":
            file.write_text('{"step": 1')
        case "bad line":
            file.write_text(lines[0] + "{oh\n" + lines[1])
        case "step twice":
            file.write_text(lines[0] + lines[1] + lines[1])
        case "no config":
            (folder / "config.yml").unlink()
        case "tag":
            (folder / "config.yml").write_text("a: !!python/object:os.system {}\n")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no metrics", "has no metrics.jsonl. Give the folder of a run"),
        ("no line", "metrics.jsonl has no line yet. Wait until"),
        ("bad line", "metrics.jsonl line 2 is not JSON"),
        ("step twice", "metrics.jsonl line 3 is of step 2, after one of step 2. Remove the line."),
        ("no config", "has no config.yml. Give the folder of a run"),
        ("tag", "config.yml: could not determine a constructor"),
    ],
)
def test_a_folder_that_is_broken_is_named(tmp_path: Path, capsys, name: str, message: str):
    broken(write_run(tmp_path / "run"), name)
    assert main(["report", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, capsys):
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a folder. Give that of a run" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--devices", "v5p:2x2x1"]) == 2
    assert "`--devices` is v5p:2x2x1 without `--compile`" in capsys.readouterr().err
