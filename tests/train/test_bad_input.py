"""What goes wrong around a run, its folder and its disk: a clear error, and nothing lost."""

import errno
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jaxpipe.cli import main
from jaxpipe.train import Config, RunError, read_metrics, train
from jaxpipe.train.logs import metrics_writer
from jaxpipe.train.runtime import LOCK_FILE, locked_run_folder

from .runs import NONE, TINY

SETTINGS = TINY | NONE | {"ici_fsdp_parallelism": 8, "per_device_batch_size": 1.0}
SETTINGS |= {"num_pipeline_microbatches": 1, "learning_rate_schedule_steps": 6}


def run(folder: Path, **settings) -> tuple[list[float], str]:
    shown = io.StringIO()
    config = SETTINGS | {"output_dir": str(folder)} | settings
    history = train(Config.model_validate(config), stream=shown)
    return [metrics["loss"] for metrics in history], shown.getvalue()


def test_a_folder_has_one_run_at_a_time(tmp_path):
    folder = tmp_path / "default"
    with locked_run_folder(folder):
        with pytest.raises(
            ValueError, match=f"belongs to a run that goes on: process {os.getpid()} on"
        ):
            run(tmp_path)
        assert [file.name for file in folder.iterdir()] == [LOCK_FILE]
    assert len(run(tmp_path, steps=1)[0]) == 1


def test_a_run_that_was_killed_leaves_its_folder_free(tmp_path):
    program = (
        "import os, sys, pathlib; from jaxpipe.train.runtime import locked_run_folder\n"
        "with locked_run_folder(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", program, tmp_path / "default"])
    assert ended.returncode == -9
    assert (tmp_path / "default" / LOCK_FILE).exists()
    assert len(run(tmp_path, steps=1)[0]) == 1


@contextmanager
def without_root() -> Iterator[None]:
    """Root may write anywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_that_may_not_be_written_to_is_refused():
    with tempfile.TemporaryDirectory() as parent:  # pytest's own are closed to all others
        os.chmod(parent, 0o755)
        locked = Path(parent) / "read-only"
        locked.mkdir(mode=0o555)
        with (
            without_root(),
            pytest.raises(ValueError) as error,
            locked_run_folder(locked / "default"),
        ):
            pass
        assert f"Nothing can be written to {str(locked / 'default')!r}" in str(error.value)
        assert "Permission denied. Choose another `output_dir`" in str(error.value)


def test_a_folder_that_cannot_be_made_is_refused_before_anything_compiles(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    assert main(["train", f"output_dir={file}", "steps=1"]) == 2
    assert "default' (`output_dir`/`run_name`): Not a directory." in capsys.readouterr().err


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    with (
        pytest.raises(ValueError, match=r"Nothing can be locked in .* or mount this one with"),
        locked_run_folder(tmp_path),
    ):
        pass


def test_a_url_is_no_folder():
    with pytest.raises(ValueError, match=r"`output_dir` is 'gs://bucket/runs'.* mount the bucket"):
        Config(output_dir="gs://bucket/runs")


FULL_DISK = """
import resource, sys
limit = int(sys.argv.pop(1))
from jaxpipe.cli import script
import orbax.checkpoint as ocp
save = ocp.CheckpointManager.save
def saving(self, step, **arguments):
    if step == 3:
        self.wait_until_finished()
        # From here on no file may have more bytes: as on a full disk, but for the number.
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return save(self, step, **arguments)
ocp.CheckpointManager.save = saving
script()
"""


@pytest.mark.parametrize(
    "asynchronous", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["async", "sync"]
)
def test_a_disk_that_is_full_during_a_save_ends_the_run_and_nothing_is_lost(tmp_path, asynchronous):
    words = [f"{key}={json.dumps(value)}" for key, value in SETTINGS.items()]
    words += ["checkpoint_period=1", "max_to_keep=1", f"output_dir={tmp_path}", "steps=6"]
    words += [f"async_checkpointing={json.dumps(asynchronous)}"]
    ended = subprocess.run(
        [sys.executable, "-c", FULL_DISK, "4096", "train", *words],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1, ended.stderr
    assert "jaxpipe: error: A checkpoint could not be written to" in ended.stderr
    assert "File too large" in ended.stderr
    assert "Complete ones are as they were: 2. " in ended.stderr

    losses, said = run(tmp_path, steps=6)
    assert "resumed after step 2" in said
    assert losses == run(tmp_path / "whole", steps=6)[0][2:]
    names = {file.name for file in (tmp_path / "default" / "checkpoints").iterdir()}
    assert names == {"2", "6"}  # what the save that failed had left is gone


def test_metrics_that_no_longer_fit_end_the_run(tmp_path):
    run(tmp_path / "compiled", steps=1, enable_checkpointing=False)  # the cache has no room below
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, hard))
    try:
        with pytest.raises(RunError, match=r"A file in .* read or written: File too large"):
            run(tmp_path, steps=1000, enable_checkpointing=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(read_metrics(tmp_path / "default" / "metrics.jsonl")) > 50  # what fitted


def test_tensorboard_on_a_full_disk_says_so_at_once(tmp_path, monkeypatch):
    from tensorboardX import record_writer

    full = io.FileIO("/dev/full", "wb")
    monkeypatch.setattr(record_writer, "open_file", lambda path: full)
    with (
        full,
        pytest.raises(OSError, match="No space left on device"),
        metrics_writer(tmp_path, first_step=1, tensorboard=True) as write,
    ):
        write(1, {"loss": 1.0})


@pytest.mark.parametrize("name", ["metrics.jsonl", "starts.jsonl"])
def test_a_line_that_is_no_json_is_named_before_the_first_step(tmp_path, name):
    (tmp_path / "default").mkdir()
    (tmp_path / "default" / name).write_text('{"step": 1,\n')
    with pytest.raises(ValueError, match=rf"{name} line 1 is not JSON: .* Remove the line"):
        run(tmp_path)
