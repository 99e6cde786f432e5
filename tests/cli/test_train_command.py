"""`jaxpipe train` from the outside: killed and resumed, and what it says to wrong settings."""

import os
import signal
import subprocess
import sys
import time

import pytest

from jaxpipe.cli import main
from quick import ENVIRONMENT

from .runs import losses

SETTINGS = [
    "dataset_type=text",
    "emulate_devices=4",
    "ici_pipeline_parallelism=2",
    "dtype=float32",
    "base_emb_dim=16",
    "base_num_decoder_layers=4",
    "base_mlp_dim=32",
    "max_target_length=32",
    "num_pipeline_microbatches=4",
    "per_device_batch_size=2",
    "steps=40",
    "checkpoint_period=3",
    "enable_tensorboard=false",
]


def start(folder, *settings) -> subprocess.Popen:
    command = [sys.executable, "-m", "jaxpipe", "train", *SETTINGS, f"output_dir={folder}"]
    return subprocess.Popen(
        [*command, *settings],
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finished(process: subprocess.Popen) -> None:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output.decode()


@pytest.mark.slow
def test_a_run_that_was_killed_and_started_again_has_the_losses_of_one_that_was_not(tmp_path):
    finished(start(tmp_path / "whole"))

    killed = start(tmp_path / "killed")
    checkpoint = tmp_path / "killed" / "default" / "checkpoints" / "6"
    deadline = time.monotonic() + 300
    while not checkpoint.exists():
        assert killed.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    before = losses(tmp_path / "killed")
    assert 6 <= len(before) < 40
    finished(start(tmp_path / "killed"))

    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["stepz=3"], "sets `stepz`, which is no key. Did you mean `steps`?"),
        (["model_name=llama9"], "`model_name` is 'llama9'"),
        (["dataset_type=text", "data_files=no/such/file.txt"], "no/such/file.txt"),
        (["ici_pipeline_parallelism=16"], "needs 16 devices and there are 8"),
        (["num_pipeline_microbatches=3"], "`num_pipeline_microbatches` = 3"),
        (["pipeline_engine=spmd"], "It should be 'none', 'circular', 'scheduled' or 'mpmd'"),
    ],
)
def test_wrong_settings_give_one_message_and_exit_code_2(settings, message, tmp_path, capsys):
    assert main(["train", f"output_dir={tmp_path}", *settings]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxpipe: error: ")
    assert message in error
    assert not list(tmp_path.iterdir())


def test_an_empty_text_is_refused(tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    settings = ["dataset_type=text", f"data_files={tmp_path / 'empty.txt'}"]
    assert main(["train", f"output_dir={tmp_path / 'runs'}", *settings]) == 2
    assert "empty.txt" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_all_keys_can_be_listed(capsys):
    assert main(["train", "--keys"]) == 0
    assert "num_pipeline_microbatches: -1" in capsys.readouterr().out


@pytest.mark.parametrize(("settings", "calls"), [([], 1), (["jax_cache_dir="], 0)])
def test_the_compile_cache_is_on_unless_a_key_turns_it_off(settings, calls, monkeypatch):
    called: list[None] = []
    monkeypatch.setattr("jaxpipe.train.train", lambda config, keep_history: [])
    monkeypatch.setattr(
        "jaxpipe.cli.commands._train.use_compile_cache", lambda: called.append(None)
    )
    assert main(["train", *settings]) == 0
    assert len(called) == calls
