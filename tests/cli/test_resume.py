"""Runs that go on: with any engine where any other one stopped, and after any number of kills."""

import os
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from .kills import Campaign
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
    num_processes, devices, more = (ENGINES | KILLED)[engine]
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


KILLED: dict[str, tuple[int, int, str]] = {
    "circular": ENGINES["circular, 4 ranks x 2 repeats"],
    "scheduled": ENGINES["scheduled 1f1b, 2 ranks"],
    "mpmd": ENGINES["mpmd interleaved, 2 ranks x 2 chunks"],
    "circular over 2 processes": (2, 1, "dcn_pipeline_parallelism=2 num_pipeline_repeats=4"),
    "scheduled over 2 processes": (
        2,
        1,
        "pipeline_engine=scheduled pipeline_schedule=1f1b dcn_pipeline_parallelism=2",
    ),
    "mpmd over 2 processes": ENGINES["mpmd over 2 processes"],
}
KILLS = {"circular": 20}  # and of each other one
OTHER_KILLS = 16
NAMED_WITHIN_SECONDS = 20.0
"""Until all survivors have named a process that has died. An idle machine takes less than one."""


@pytest.mark.slow
@pytest.mark.parametrize("engine", KILLED)
def test_after_a_hundred_kills_every_loss_is_that_of_a_run_that_was_never_killed(engine, tmp_path):
    """It evaluates after every third step and saves after each, so many kills come in
    the middle of a save or of an evaluation; others come while it starts and compiles."""
    cache = f"jax_cache_dir={tmp_path / 'cache'}"
    settings = (cache, "learning_rate_schedule_steps=100", "enable_progress_bar=false")
    often = ("checkpoint_period=1", "eval_interval=3", "eval_steps=1", "eval_split_fraction=0.1")
    killed = tmp_path / "killed"
    words = words_of(engine, killed, *settings, *often, "steps=1000000")
    campaign = Campaign(words, killed, KILLED[engine][0], random.Random(os.getpid()))
    for _ in range(KILLS.get(engine, OTHER_KILLS)):
        campaign.kill()
    for number in (signal.SIGINT, signal.SIGHUP):
        campaign.interrupt(number)
    steps = f"steps={len(losses(killed)) + 5}"
    said = train(engine, killed, *settings, *often, steps)
    assert "resumed after step" in said
    train(engine, tmp_path / "whole", *settings, "eval_split_fraction=0.1", steps)
    whole = losses(tmp_path / "whole")
    print(f"{engine}: {len(whole)} steps; seconds until named: {sorted(campaign.naming)}")
    assert losses(killed) == whole
    assert campaign.seen <= set(enumerate(whole))
    assert sum("resumed after step" in output for output in campaign.said) > len(campaign.said) / 3
    assert not any("corrupt" in output for output in campaign.said)
    assert max(campaign.naming, default=0.0) < NAMED_WITHIN_SECONDS
