"""What a page warns of: in runs that are made to have it, and not in others."""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from jaxpipe import report
from jaxpipe.report.analysis import Finding, findings, spikes, status
from jaxpipe.report.record import Series

from .written import NOW, Metrics, usual, write_checkpoint, write_run, write_starts


def found_in(folder: Path, bubble: float | None = None) -> dict[str, Finding]:
    run = report.read_run(folder)
    return {f.title: f for f in findings(run, status(run, NOW.timestamp()), bubble)}


def changed(at: range, **values: float) -> Metrics:
    """Usual metrics with other values in some steps."""

    def metrics(step: int) -> Mapping[str, float]:
        return usual(step) | (values if step in at else {})

    return metrics


def evaluated(step: int) -> Mapping[str, float]:
    """Usual metrics, with an evaluation after every tenth step that is best after step 20."""
    return usual(step) | ({"eval_loss": 3 + abs(step - 20) / 20} if step % 10 == 0 else {})


def test_a_run_where_all_is_well_has_no_findings(tmp_path: Path):
    folder = write_run(tmp_path)
    write_checkpoint(folder, "60")
    assert found_in(folder, bubble=0.2) == {}


@pytest.mark.parametrize(
    ("metrics", "title", "text", "steps"),
    [
        (
            changed(range(7, 9), gradient_norm=math.inf),
            "gradient_norm is not a number",
            "NaN or infinite in steps 7, 8.",
            (7, 8),
        ),
        (
            changed(range(50, 53), loss=4.0),
            "Spikes in the loss",
            "The loss left the range of the 32 steps before in step 50.",
            (50,),
        ),
        (evaluated, "Rising evaluation loss", "It was 3 after step 20 and is 5: ", (20,)),
        (
            changed(range(20, 30), step_time_seconds=5.0),
            "Slow steps",
            "in steps 20, 21, 22, 23, 24, 25, 26, 27 and 2 more: 45 s in all",
            tuple(range(20, 30)),
        ),
        (
            changed(range(40, 61), tokens_per_second=3000.0),
            "Falling throughput",
            "The last tenth of the steps has a median of 3,000 tokens/s, the fastest tenth 4,1",
            (),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value[0].isupper() else "",
)
def test_steps_that_are_out_of_the_ordinary_are_named(
    tmp_path: Path, metrics: Metrics, title: str, text: str, steps: tuple[int, ...]
):
    found = found_in(write_run(tmp_path, metrics=metrics))
    assert list(found) == [title]
    assert text in found[title].text
    assert found[title].steps == steps


def test_a_step_that_compiles_anew_after_a_restart_is_not_slow(tmp_path: Path):
    folder = write_run(tmp_path, metrics=changed(range(31, 32), step_time_seconds=30.0))
    assert "Slow steps" in found_in(folder)
    write_starts(folder, {"first_step": 1}, {"first_step": 31})
    assert "Slow steps" not in found_in(folder)


def test_lines_that_are_missing_and_steps_that_no_checkpoint_has_are_counted(tmp_path: Path):
    folder = write_run(tmp_path, steps=40)
    write_checkpoint(folder, "30")
    write_checkpoint(folder, "35", complete=False)
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[2:9] + lines[12:]))
    found = found_in(folder, bubble=0.5)
    assert "no line of 5 steps, after steps 0, 9." in found["Missing lines"].text
    unsaved = found["Steps after the newest checkpoint"].text
    assert unsaved == "Started again, the run goes on after step 30: 10 steps come again."
    assert found["Corrupt checkpoint"].text == "The checkpoint of step 35 is incomplete."
    assert "the busiest rank waits for 50% of a step" in found["Large bubble"].text


def test_a_checkpoint_whose_file_has_another_size_is_corrupt(tmp_path: Path):
    folder = write_run(tmp_path)
    step = write_checkpoint(folder, "60")
    (step / "state").write_text("x")
    (saved,) = report.read_run(folder).saved
    assert (saved.state, saved.step) == ("corrupt", 60)
    (step / "state").unlink()
    assert report.read_run(folder).saved[0].state == "corrupt"


def test_an_old_step_that_is_removed_while_it_is_looked_at_is_gone(tmp_path: Path, monkeypatch):
    folder = write_run(tmp_path)
    write_checkpoint(folder, "60")
    old = write_checkpoint(folder, "40")
    (old / "weights").mkdir()
    look = Path.is_file

    def is_file(path: Path) -> bool:
        if old in path.parents:
            shutil.rmtree(old, ignore_errors=True)
        return look(path)

    monkeypatch.setattr(Path, "is_file", is_file)
    assert [(saved.step, saved.state) for saved in report.read_run(folder).saved] == [
        (60, "complete")
    ]
    assert not old.exists()


def test_a_bad_step_is_said_as_the_run_says_it(tmp_path: Path):
    limited = {"max_gradient_norm": 2.0}
    run = report.read_run(
        write_run(tmp_path, settings=limited, metrics=changed(range(60, 61), gradient_norm=2.0001))
    )
    said = status(run, NOW.timestamp())
    assert (said.kind, said.text) == (
        "bad",
        "Step 60 of 60 is bad: its gradient_norm is 2.0001, above 2",
    )


def test_a_loss_that_falls_with_noise_has_no_spikes():
    rng = np.random.default_rng(0)
    steps = np.arange(1, 5001)
    values = 2 + 5 / np.sqrt(steps) + 0.05 * rng.normal(size=5000)
    assert spikes(Series(steps, values)).tolist() == []
    values[[1000, 1001, 3000]] += 1
    values[2000] = math.nan
    assert spikes(Series(steps, values)).tolist() == [1001, 3001]
