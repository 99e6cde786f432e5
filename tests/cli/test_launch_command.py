"""`jaxpipe launch` from the outside: runs over processes, and what is left when one dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpipe.cli import main
from jaxpipe.cli._launch import _first_failure, _Job
from jaxpipe.cli._processes import ADDRESS, NUM_PROCESSES, PROCESS, join_processes
from quick import ENVIRONMENT

from .runs import SMALL, losses, run_jaxpipe

SETTINGS = [
    *SMALL,
    "base_num_decoder_layers=4",
    "checkpoint_period=2",
    "learning_rate_schedule_steps=8",
]
RUNS: dict[str, tuple[int, str]] = {
    "none": (0, "pipeline_engine=none emulate_devices=1 per_device_batch_size=8"),
    "mpmd on 2": (
        2,
        "pipeline_engine=mpmd emulate_devices=1 ici_pipeline_parallelism=2 per_device_batch_size=4 "
        "pipeline_schedule=zbv pipeline_layout=Et|t|tt|L mpmd_timeout_seconds=60",
    ),
    "mpmd on 2, interleaved": (
        2,
        "pipeline_engine=mpmd emulate_devices=1 ici_pipeline_parallelism=2 per_device_batch_size=4 "
        "pipeline_schedule=interleaved_1f1b",
    ),
    "mpmd on 2, fsdp 2": (
        2,
        "pipeline_engine=mpmd emulate_devices=2 dcn_pipeline_parallelism=2 per_device_batch_size=2 "
        "ici_fsdp_parallelism=2 pipeline_schedule=1f1b",
    ),
    "mpmd on 4": (
        4,
        "pipeline_engine=mpmd emulate_devices=1 dcn_pipeline_parallelism=4 per_device_batch_size=2",
    ),
    "circular on 2": (
        2,
        "emulate_devices=2 dcn_pipeline_parallelism=2 ici_fsdp_parallelism=2 "
        "per_device_batch_size=2",
    ),
    "scheduled on 4, stages and data": (
        4,
        "pipeline_engine=scheduled pipeline_schedule=1f1b emulate_devices=1 "
        "dcn_pipeline_parallelism=2 dcn_data_parallelism=2 per_device_batch_size=2",
    ),
}


def run(name: str, folder: Path, steps: int, *more: str) -> str:
    """Trains up to a step, resuming; what process 0 has said."""
    num_processes, settings = RUNS[name]
    words = ["train"] if not num_processes else ["launch", "--processes", str(num_processes)]
    words += [*SETTINGS, *settings.split(), f"steps={steps}", f"output_dir={folder}", *more]
    return run_jaxpipe(*words)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> list[float]:
    folder = tmp_path_factory.mktemp("plain")
    run("none", folder, 8)
    return losses(folder)


@pytest.mark.parametrize(
    "names",
    [
        ("mpmd on 2", "none"),
        pytest.param(
            ("none", "mpmd on 2, interleaved", "mpmd on 4", "mpmd on 2"), marks=pytest.mark.slow
        ),
        pytest.param(("mpmd on 2, fsdp 2", "circular on 2"), marks=pytest.mark.slow),
        pytest.param(("scheduled on 4, stages and data", "mpmd on 4"), marks=pytest.mark.slow),
        pytest.param(("circular on 2", "mpmd on 2, fsdp 2", "none"), marks=pytest.mark.slow),
    ],
    ids=" -> ".join,
)
def test_runs_go_on_over_other_processes_with_the_losses_of_the_run_in_one(plain, names, tmp_path):
    for i, name in enumerate(names):
        said = run(name, tmp_path, 2 * i + 2)
        assert ("resumed after step" in said) == bool(i)
    np.testing.assert_allclose(losses(tmp_path), plain[: 2 * len(names)], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mpmd on 2, fsdp 2", "circular on 2"])
def test_a_run_over_processes_begins_with_the_weights_of_another(name, tmp_path):
    run("none", tmp_path / "first", 2)
    begin = f"init_from={tmp_path / 'first' / 'default'}"
    run("none", tmp_path / "one", 2, begin)
    run(name, tmp_path / "several", 2, begin)
    expected = losses(tmp_path / "one")
    assert expected[0] != losses(tmp_path / "first")[0]
    np.testing.assert_allclose(losses(tmp_path / "several"), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [
        "dcn_data_parallelism=2 ici_pipeline_parallelism=2",
        "dcn_pipeline_parallelism=2 ici_data_parallelism=2",
    ],
)
def test_processes_that_each_make_their_own_rows_have_the_losses_of_one(axes, tmp_path):
    # A line of a sonnet is a row: they have different numbers of targets.
    settings = 'dataset_type=text packing=false max_target_length=64 text_separator="\\n"'
    one = "pipeline_engine=none emulate_devices=1 per_device_batch_size=8"
    two = f"emulate_devices=2 per_device_batch_size=2 {axes}"
    for name, (processes, words) in {"one": (0, one), "two": (2, two)}.items():
        RUNS[name] = (processes, f"{settings} {words}")
    run("one", tmp_path / "one", 3)
    run("two", tmp_path / "two", 3)
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-5)


def started(folder: Path, *settings: str) -> tuple[subprocess.Popen, list[int]]:
    """A launcher whose two processes train without end, and these, once they do."""
    words = [*SETTINGS, *RUNS["mpmd on 2"][1].split(), "steps=1000000", f"output_dir={folder}"]
    command = [sys.executable, "-m", "jaxpipe", "launch", "--processes", "2", "--grace", "30"]
    launcher = subprocess.Popen(
        [*command, *words, *settings],
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    metrics, deadline = folder / "default" / "metrics.jsonl", time.monotonic() + 300
    while not metrics.exists() or not metrics.read_text():
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return launcher, _children(launcher.pid)


def test_when_a_process_dies_the_launcher_says_so_and_leaves_none(tmp_path):
    launcher, children = started(tmp_path, "enable_checkpointing=false")
    try:
        os.kill(children[1], signal.SIGKILL)
        output, _ = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    assert launcher.returncode == 128 + signal.SIGKILL, output
    assert "process 1 has ended by SIGKILL" in output
    assert "jaxpipe: process 0: " in output  # what it waited for
    assert not any(Path(f"/proc/{child}").exists() for child in children)


@pytest.mark.slow
def test_sigterm_to_the_launcher_ends_all_processes_after_one_step_with_a_checkpoint(tmp_path):
    launcher, children = started(tmp_path, "checkpoint_period=1000000")
    try:
        launcher.send_signal(signal.SIGTERM)
        output, _ = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    assert launcher.returncode == 128 + signal.SIGTERM, output
    assert "jaxpipe: error" not in output
    done = len(losses(tmp_path))
    assert f"stopped after step {done}: start again to go on" in output
    assert (tmp_path / "default" / "checkpoints" / str(done)).is_dir()
    assert not any(Path(f"/proc/{child}").exists() for child in children)


class Ended:
    """A process that has."""

    def __init__(self, code: int) -> None:
        self.returncode = code

    def poll(self) -> int:
        return self.returncode


@pytest.mark.parametrize(
    ("codes", "signals", "code", "said"),
    [
        ((0, 0), 0, 0, ""),
        ((143, 143), 1, 143, ""),
        ((143, 1), 1, 1, "process 1 has ended with code 1."),
        ((143, 143), 0, 143, "process 0 has ended with code 143."),
        ((0, -9), 0, 137, "process 1 has ended by SIGKILL."),
    ],
)
def test_the_exit_code_is_that_of_the_first_process_that_was_not_told_to_end(
    codes, signals, code, said, capsys
):
    running: list[Any] = [Ended(code) for code in codes]
    assert _first_failure(_Job(running, [], signals), grace=0) == code
    assert capsys.readouterr().err.replace("jaxpipe: error: ", "").strip() == said


@pytest.mark.slow
def test_processes_whose_time_is_over_have_done_what_they_should(tmp_path):
    said = run("mpmd on 2", tmp_path, 1000000, "max_minutes=0.05")
    assert "start again to go on" in said


def _children(process: int) -> list[int]:
    """In the order of their start."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process)], capture_output=True)
    return sorted(map(int, listed.stdout.split()))


def test_settings_that_are_wrong_are_said_once_and_nothing_starts(capsys):
    assert main(["launch", "--processes", "2", "steps=many"]) == 2
    assert capsys.readouterr().err.count("jaxpipe: error: ") == 1
    assert main(["launch", "--processes", "0"]) == 2
    assert "`--processes` is 0. Give at least 1." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({NUM_PROCESSES: "two"}, f"{NUM_PROCESSES} is 'two'"),
        ({NUM_PROCESSES: "2"}, f"{PROCESS} is '' and {NUM_PROCESSES} is set. Give a number."),
        ({NUM_PROCESSES: "2", PROCESS: "1"}, f"{NUM_PROCESSES} is set and {ADDRESS} is not."),
    ],
)
def test_a_job_that_cannot_be_joined_says_what_is_missing(environment, message, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        join_processes(detect=False)


def test_a_process_outside_of_any_job_says_how_to_start_one():
    command = [sys.executable, "-m", "jaxpipe", "train", "distributed=true"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2
    assert "`distributed` is true, but JAX finds no job around this process" in ended.stderr
