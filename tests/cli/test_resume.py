"""Runs that go on: with any engine where any other one stopped, and after any number of kills."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from quick import ENVIRONMENT

from .runs import SMALL, losses, run_jaxpipe

SETTINGS = [
    *SMALL,
    "dataset_type=text",
    "base_num_decoder_layers=8",
    "checkpoint_period=5",
    "learning_rate_schedule_steps=10",
]
ROWS = 8

# Processes (0: one, without the launcher), devices of each, and what else the run is told.
ENGINES: dict[str, tuple[int, int, str]] = {
    "none": (0, 1, "pipeline_engine=none"),
    "circular, 4 ranks x 2 repeats": (
        0,
        4,
        "ici_pipeline_parallelism=4 num_pipeline_repeats=2",
    ),
    "scheduled 1f1b, 2 ranks": (
        0,
        2,
        "pipeline_engine=scheduled pipeline_schedule=1f1b ici_pipeline_parallelism=2",
    ),
    "mpmd interleaved, 2 ranks x 2 chunks": (
        0,
        2,
        "pipeline_engine=mpmd pipeline_schedule=interleaved_1f1b ici_pipeline_parallelism=2 "
        "num_pipeline_repeats=2",
    ),
    "mpmd over 2 processes": (
        2,
        1,
        "pipeline_engine=mpmd pipeline_schedule=1f1b dcn_pipeline_parallelism=2 "
        "mpmd_timeout_seconds=120",
    ),
}


def words_of(engine: str, folder: Path, *settings: str) -> list[str]:
    num_processes, devices, more = ENGINES[engine]
    words = ["launch", "--processes", str(num_processes)] if num_processes else ["train"]
    rows = ROWS / devices / max(num_processes, 1)
    words += [*SETTINGS, *more.split(), f"emulate_devices={devices}"]
    words += [f"per_device_batch_size={rows:g}", *settings]
    return [*words, f"output_dir={folder}"]


def train(engine: str, folder: Path, *settings: str) -> str:
    return run_jaxpipe(*words_of(engine, folder, *settings))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Path]:
    """Ten steps with every engine, and a checkpoint after five."""
    folders = {name: tmp_path_factory.mktemp("whole") for name in ENGINES}
    for name, folder in folders.items():
        train(name, folder, "steps=10")
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("loads", ENGINES)
@pytest.mark.parametrize("saves", ENGINES)
def test_every_engine_goes_on_from_the_checkpoint_of_every_other(saves, loads, whole, tmp_path):
    shutil.copytree(whole[saves], tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "default" / "checkpoints" / "10")
    assert "resumed after step 5" in train(loads, tmp_path, "steps=10")
    expected, found = losses(whole[saves]), losses(tmp_path)
    assert found[:5] == expected[:5]
    np.testing.assert_allclose(found[5:], expected[5:], rtol=1e-6)
    if saves == loads:
        assert found == expected


def num_steps(folder: Path) -> int:
    file = folder / "default" / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def kill_one(folder: Path, settings: tuple[str, ...], rng: random.Random) -> str:
    """Starts a run and kills it at a random moment, in most cases after its first step."""
    is_late = rng.random() < 0.8
    words = words_of("circular, 4 ranks x 2 repeats", folder, *settings)
    run = subprocess.Popen(
        [sys.executable, "-u", "-m", "jaxpipe", *words],
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 300
    try:
        # A start drops the lines of steps that come again; from then on every step adds one.
        fewest = num_steps(folder)
        while is_late and (count := num_steps(folder)) <= fewest:
            fewest = count
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(3 * rng.random())
    finally:
        run.kill()
        output, _ = run.communicate(timeout=60)
    assert run.returncode == -signal.SIGKILL, output
    return output


@pytest.mark.slow
def test_after_twenty_kills_the_losses_are_those_of_a_run_that_was_never_killed(tmp_path):
    """It saves after every other step, so many kills come in the middle of a save."""
    settings = ("checkpoint_period=2", "learning_rate_schedule_steps=100")
    settings += (f"jax_cache_dir={tmp_path / 'cache'}", "enable_progress_bar=false")
    rng, killed = random.Random(os.getpid()), tmp_path / "killed"
    said = [kill_one(killed, (*settings, "steps=1000000"), rng) for _ in range(20)]
    steps = f"steps={len(losses(killed)) + 5}"
    engine = "circular, 4 ranks x 2 repeats"
    said.append(train(engine, killed, *settings, steps))
    train(engine, tmp_path / "whole", *settings, steps)
    assert losses(killed) == losses(tmp_path / "whole")
    assert sum("resumed after step" in output for output in said) > 10
    assert not any("damaged" in output or "Traceback" in output for output in said)
