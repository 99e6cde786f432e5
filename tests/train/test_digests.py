"""Damage to a checkpoint is found and said, an older one is used, nothing damaged is loaded."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxpipe.train import Config, train
from jaxpipe.train._digests import damage, set_aside_damaged, steps_in

from .runs import NONE, TINY


def run_to(folder: Path, steps: int, **settings) -> tuple[list[float], str]:
    """A run with a checkpoint after every step, and what it says."""
    base = TINY | NONE | {"ici_fsdp_parallelism": 8, "per_device_batch_size": 1.0}
    base |= {"learning_rate_schedule_steps": 6, "checkpoint_period": 1}
    base |= {"num_pipeline_microbatches": 1}
    shown = io.StringIO()
    config = base | {"steps": steps, "output_dir": str(folder)} | settings
    history = train(Config.model_validate(config), stream=shown)
    return [metrics["loss"] for metrics in history], shown.getvalue()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, run_to(folder, 3)[0]


def checkpoints_in(folder: Path) -> Path:
    return folder / "default" / "checkpoints"


def largest_file(step: Path) -> Path:
    files = (file for file in step.rglob("*") if file.is_file())
    return max(files, key=lambda file: file.stat().st_size)


def truncate(step: Path) -> None:
    file = largest_file(step)
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_bit(step: Path) -> None:
    file = largest_file(step)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def delete(step: Path) -> None:
    largest_file(step).unlink()


def put_a_folder_there(step: Path) -> None:
    """Reading it fails, as on a disk that does."""
    file = largest_file(step)
    size = file.stat().st_size
    file.unlink()
    file.mkdir()
    known = json.loads((step / "digests.json").read_text())
    known[str(file.relative_to(step))][0] = file.stat().st_size
    assert size != file.stat().st_size
    (step / "digests.json").write_text(json.dumps(known))


def garble_the_digests(step: Path) -> None:
    (step / "digests.json").write_text("{")


@pytest.mark.parametrize("asynchronous", [True, False])
def test_every_file_of_a_complete_step_has_a_digest(tmp_path, asynchronous):
    run_to(tmp_path, 2, async_checkpointing=asynchronous)
    steps = steps_in(checkpoints_in(tmp_path))
    assert [step.name for step in steps] == ["2", "1"]
    for step in steps:
        known = json.loads((step / "digests.json").read_text())
        files = {str(f.relative_to(step)) for f in step.rglob("*") if f.is_file()}
        own = {"digests.json", "_CHECKPOINT_METADATA", "commit_success.txt"}
        assert known.keys() | own == files | own and len(known) > 5
        assert damage(step) == []


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (truncate, "bytes of"),
        (flip_a_bit, "has changed"),
        (delete, "is missing"),
        (put_a_folder_there, "cannot be read: Is a directory"),
        (garble_the_digests, "digests.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_left_out_and_the_run_goes_on_from_the_one_before(
    whole, tmp_path, harm: Callable[[Path], None], words: str
):
    folder, losses = whole
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    checkpoints = checkpoints_in(tmp_path)
    harm(checkpoints / "3")
    found, said = run_to(tmp_path, 3)
    assert f"The checkpoint {checkpoints / '3'} is damaged: " in said and words in said
    assert "resumed after step 2" in said
    assert found == losses[2:]
    assert (checkpoints / "3.damaged").is_dir() and damage(checkpoints / "3") == []


def test_a_step_may_be_damaged_twice(whole, tmp_path):
    folder, losses = whole
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for _ in range(2):
        flip_a_bit(checkpoints_in(tmp_path) / "3")
        assert run_to(tmp_path, 3)[0] == losses[2:]
    names = {step.name for step in checkpoints_in(tmp_path).iterdir()}
    assert {"3", "3.damaged", "3.damaged-2"} <= names


def test_if_all_are_damaged_the_run_says_so_of_each_and_begins_anew(whole, tmp_path):
    folder, losses = whole
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for step in steps_in(checkpoints_in(tmp_path)):
        flip_a_bit(step)
    found, said = run_to(tmp_path, 2)
    assert said.count("is damaged") == 3 and "resumed" not in said
    assert found == losses[:2]


def test_init_from_a_damaged_checkpoint_is_refused(whole, tmp_path):
    folder, _ = whole
    shutil.copytree(folder, tmp_path / "saved")
    flip_a_bit(checkpoints_in(tmp_path / "saved") / "3")
    with pytest.raises(ValueError, match=r"3 is damaged: .* has changed. Give another step"):
        run_to(tmp_path / "new", 1, init_from=str(tmp_path / "saved" / "default"))


def test_a_step_without_digests_is_taken_as_it_is(whole, tmp_path):
    shutil.copytree(checkpoints_in(whole[0]), tmp_path, dirs_exist_ok=True)
    (tmp_path / "3" / "digests.json").unlink()
    assert set_aside_damaged(tmp_path) == []
