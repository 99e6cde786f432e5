"""Damage to a checkpoint is found and said, an older one is used, nothing corrupt is loaded."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxpipe.train import Config, read_metrics, train
from jaxpipe.train.checkpoint import find_corruption, steps_in

from .runs import NONE, TINY

pytestmark = pytest.mark.ci


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
def whole(cached, tmp_path_factory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, run_to(folder, 3)[0]


def checkpoints_in(folder: Path) -> Path:
    return folder / "default" / "checkpoints"


def content_of(folder: Path) -> dict[str, bytes]:
    """Every file but the lock, which says who looked last."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != "lock")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


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
    file = largest_file(step)
    file.unlink()
    file.mkdir()


def garble_the_digests(step: Path) -> None:
    (step / "digests.json").write_text("{")


def change_the_digests(step: Path) -> None:
    text = (step / "digests.json").read_text()
    (step / "digests.json").write_text(text.replace('"step": 3', '"step": 4'))


def delete_the_marker(step: Path) -> None:
    (step / "_CHECKPOINT_METADATA").unlink()


def change_the_marker(step: Path) -> None:
    file = step / "_CHECKPOINT_METADATA"
    file.write_text(file.read_text().replace("timestamp", "timestomp", 1))


def add_a_file(step: Path) -> None:
    (step / "state" / "more").touch()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_every_file_of_a_complete_step_has_a_digest(tmp_path, asynchronous):
    run_to(tmp_path, 2, async_checkpointing=asynchronous)
    steps = steps_in(checkpoints_in(tmp_path))
    assert [step.name for step in steps] == ["2", "1"]
    for step in steps:
        known = json.loads((step / "digests.json").read_text())
        files = {str(f.relative_to(step)) for f in step.rglob("*") if f.is_file()}
        assert known["files"].keys() | {"digests.json"} == files and len(files) > 5
        assert known["step"] == int(step.name)
        assert find_corruption(step) == []


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (truncate, "bytes of"),
        (flip_a_bit, "has changed"),
        (delete, "is missing"),
        (put_a_folder_there, "is not a regular file"),
        (garble_the_digests, "digests.json is not what a run writes"),
        (change_the_digests, "digests.json has changed"),
        (delete_the_marker, "_CHECKPOINT_METADATA is missing"),
        (change_the_marker, "_CHECKPOINT_METADATA has changed"),
        (add_a_file, "state/more does not belong to it"),
    ],
)
def test_a_corrupt_checkpoint_is_left_out_and_the_run_goes_on_from_the_one_before(
    whole, tmp_path, harm: Callable[[Path], None], words: str
):
    folder, losses = whole
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    checkpoints = checkpoints_in(tmp_path)
    harm(checkpoints / "3")
    found, said = run_to(tmp_path, 3)
    assert f"The checkpoint {checkpoints / '3'} is corrupt: " in said and words in said
    assert "resumed after step 2" in said
    assert found == losses[2:]
    assert (checkpoints / "3.damaged").is_dir() and find_corruption(checkpoints / "3") == []
    assert not (checkpoints / ".removed").exists()


def test_a_step_may_be_corrupt_twice(whole, tmp_path):
    folder, losses = whole
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for _ in range(2):
        flip_a_bit(checkpoints_in(tmp_path) / "3")
        assert run_to(tmp_path, 3)[0] == losses[2:]
    names = {step.name for step in checkpoints_in(tmp_path).iterdir()}
    assert {"3", "3.damaged", "3.damaged-2"} <= names


def test_if_all_are_corrupt_the_run_is_refused_until_it_is_told_to_begin_anew(whole, tmp_path):
    folder, losses = whole
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for step in steps_in(checkpoints_in(tmp_path)):
        flip_a_bit(step)
    before = content_of(tmp_path)
    with pytest.raises(ValueError, match=r"3 that are corrupt.*has changed.*`begin_anew=true`"):
        run_to(tmp_path, 2)
    assert content_of(tmp_path) == before
    found, said = run_to(tmp_path, 2, begin_anew=True)
    assert said.count("is corrupt") == 3 and "resumed" not in said
    assert found == losses[:2]
    metrics = tmp_path / "default" / "before-1.metrics.jsonl"
    assert len(read_metrics(metrics)) == 3


def test_init_from_a_corrupt_checkpoint_is_refused(whole, tmp_path):
    folder, _ = whole
    shutil.copytree(folder, tmp_path / "saved")
    flip_a_bit(checkpoints_in(tmp_path / "saved") / "3")
    with pytest.raises(ValueError, match=r"3 is corrupt: .* has changed. Give another step"):
        run_to(tmp_path / "new", 1, init_from=str(tmp_path / "saved" / "default"))


def empty(file: Path) -> None:
    file.write_text("")


def of_an_older_version(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_text())["files"]))


@pytest.mark.parametrize("harm", [Path.unlink, empty, of_an_older_version])
def test_a_checkpoint_without_digests_is_refused_unless_the_user_allows_it(whole, tmp_path, harm):
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    digests = checkpoints_in(tmp_path) / "3" / "digests.json"
    harm(digests)
    before = content_of(tmp_path)
    with pytest.raises(ValueError, match=rf"{digests} is missing, empty or .*`allow_unverified=tr"):
        run_to(tmp_path, 4)
    with pytest.raises(ValueError, match=rf"{digests} is missing, .* `allow_unverified=true` of"):
        run_to(tmp_path / "new", 1, init_from=str(tmp_path / "default"))
    shutil.rmtree(tmp_path / "new")
    assert content_of(tmp_path) == before
    assert "resumed after step 3" in run_to(tmp_path, 4, allow_unverified=True)[1]
    if harm is of_an_older_version:  # it says at least what the files were
        flip_a_bit(checkpoints_in(tmp_path) / "3")
        assert "has changed" in find_corruption(checkpoints_in(tmp_path) / "3")[0]


@pytest.mark.parametrize("how", ["renamed", "copied", "swapped", "linked"])
def test_a_checkpoint_under_the_name_of_another_step_is_found(whole, tmp_path, how):
    folder, losses = whole
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    steps = checkpoints_in(tmp_path)
    if how == "renamed":
        (steps / "3").rename(steps / "10")
    elif how == "copied":
        shutil.copytree(steps / "2", steps / "10")
    elif how == "linked":
        (steps / "10").symlink_to(steps / "1")
    else:
        (steps / "3").rename(steps / "x")
        (steps / "2").rename(steps / "3")
        (steps / "x").rename(steps / "2")
    found, said = run_to(tmp_path, 3)
    number = {"renamed": 3, "copied": 2, "swapped": 2, "linked": 1}[how]
    name = "3" if how == "swapped" else "10"
    assert (
        f"The checkpoint {steps / name} is corrupt: it is step {number}, renamed or copied" in said
    )
    assert (steps / f"{name}.damaged").is_dir()
    if how in ("renamed", "swapped"):
        assert found == losses[2 if how == "renamed" else 1 :]
    else:
        assert "has all 3 steps" in said
