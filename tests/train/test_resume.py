"""What a run's folder holds decides where it goes on; nothing that was saved is lost unsaid."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from orbax.checkpoint import CheckpointManager

from jaxpipe.cli import main
from jaxpipe.train import Config, RunError, read_metrics
from jaxpipe.train.checkpoint import is_complete
from jaxpipe.train.loop import check_learning_rate, read_saved
from jaxpipe.train.runtime import LOCK_FILE, locked_run_folder

from .test_digests import checkpoints_in, content_of, flip_a_bit, run_to

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def whole(cached, tmp_path_factory) -> tuple[Path, list[float]]:
    """Three steps, each with a checkpoint."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run_to(folder, 3)[0]


@pytest.fixture
def copy(whole, tmp_path: Path) -> Path:
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


def failing(monkeypatch: pytest.MonkeyPatch, file: Path, number: int) -> None:
    """Makes a file or folder unreadable, as a disk or a server does."""

    def failing_on(function: Callable) -> Callable:
        def call(path, *args, **options):
            if isinstance(path, str | os.PathLike) and Path(path) == file:
                raise OSError(number, os.strerror(number), os.fspath(path))
            return function(path, *args, **options)

        return call

    monkeypatch.setattr(Path, "open", failing_on(Path.open))
    monkeypatch.setattr(os, "listdir", failing_on(os.listdir))
    if number == errno.ESTALE:
        monkeypatch.setattr(os, "stat", failing_on(os.stat))


UNREADABLE = (
    "checkpoints",
    "checkpoints/3/digests.json",
    "checkpoints/3/metadata/metadata",
    "checkpoints/2/metadata/metadata",
    "metrics.jsonl",
    "starts.jsonl",
)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_stops_the_run_and_is_not_corrupt(copy, monkeypatch, name, number):
    file, before = copy / "default" / name, content_of(copy)
    with monkeypatch.context() as patch:
        failing(patch, file, number)
        with pytest.raises(RunError) as error:
            run_to(copy, 4)
    assert str(error.value).startswith(f"{file} cannot be read: {os.strerror(number)}. This is not")
    assert "\n" not in str(error.value)
    assert content_of(copy) == before


@pytest.mark.parametrize("name", ["digests.json", "metadata/metadata"])
def test_weights_are_not_taken_from_what_cannot_be_read(copy, monkeypatch, capsys, name):
    file = checkpoints_in(copy) / "3" / name
    failing(monkeypatch, file, errno.EIO)
    with pytest.raises(RunError, match=rf"{file} cannot be read: Input/output error"):
        run_to(copy / "new", 1, init_from=str(copy / "default"))
    assert main(["convert", str(copy / "default"), str(copy / "hf")]) == 1
    assert f"{file} cannot be read: Input/output error" in capsys.readouterr().err


def test_a_report_says_of_a_checkpoint_that_it_cannot_be_read_and_stops_at_metrics(
    copy, monkeypatch
):
    from jaxpipe.report import read_run

    with monkeypatch.context() as patch:
        failing(patch, checkpoints_in(copy) / "3" / "metadata" / "metadata", errno.EACCES)
        states = {saved.step: saved.state for saved in read_run(copy / "default").saved}
    assert states == {3: "cannot be read", 2: "complete", 1: "complete"}
    failing(monkeypatch, copy / "default" / "metrics.jsonl", errno.EIO)
    with pytest.raises(RunError, match=r"metrics\.jsonl cannot be read: Input/output error"):
        read_run(copy / "default")


@pytest.mark.parametrize("how", ["moved", "emptied", "dangling", "file"])
def test_a_run_whose_checkpoints_are_gone_is_refused_and_begins_anew_if_told_to(copy, whole, how):
    checkpoints = checkpoints_in(copy)
    checkpoints.rename(copy / "elsewhere")
    if how == "emptied":
        checkpoints.mkdir()
    elif how == "dangling":
        checkpoints.symlink_to(copy / "not mounted")
    elif how == "file":
        checkpoints.touch()
    before = content_of(copy)
    with pytest.raises(ValueError) as error:
        run_to(copy, 4)
    assert content_of(copy) == before and str(checkpoints) in str(error.value)
    if how in ("dangling", "file"):
        assert "is not a folder, or a link to one that does not exist" in str(error.value)
        return
    assert "but the run has saved step 3. Nothing has been changed." in str(error.value)
    assert "`begin_anew=true`" in str(error.value)
    found, said = run_to(copy, 3, begin_anew=True)
    assert found == whole[1] and "What it was is kept as before-1.metrics.jsonl" in said
    assert len(read_metrics(copy / "default" / "before-1.metrics.jsonl")) == 3
    assert "resumed after step 3" in run_to(copy, 4, begin_anew=True)[1]  # a job that comes again


@pytest.mark.parametrize("gone", [["saved.json"], ["saved.json", "starts.jsonl"]])
def test_metrics_alone_show_that_there_were_checkpoints(copy, gone):
    shutil.rmtree(checkpoints_in(copy))
    for name in gone:
        (copy / "default" / name).unlink()
    with pytest.raises(ValueError, match=r"metrics\.jsonl has 3 steps\. Nothing has been changed"):
        run_to(copy, 4)


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again_by_itself(
    tmp_path, whole, monkeypatch
):
    def killed(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointManager, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            run_to(tmp_path, 3, checkpoint_period=2)
    metrics = tmp_path / "default" / "metrics.jsonl"
    assert len(read_metrics(metrics)) == 2 and read_saved(tmp_path / "default") == 0
    metrics.write_bytes(metrics.read_bytes() + b"\0\0\0\n\0")  # as a loss of power leaves it
    assert run_to(tmp_path, 3, checkpoint_period=2)[0] == whole[1]
    assert [line["step"] for line in read_metrics(metrics)] == [1, 2, 3]


def test_a_run_without_checkpoints_starts_again_but_not_beside_checkpoints(copy, tmp_path, whole):
    off = {"enable_checkpointing": False}
    for _ in range(2):
        assert run_to(tmp_path / "off", 2, **off)[0] == whole[1][:2]
    before = content_of(copy)
    with pytest.raises(ValueError, match=r"`enable_checkpointing` is false, and .* saved step 3"):
        run_to(copy, 4, **off)
    assert content_of(copy) == before


def test_an_older_checkpoint_is_gone_on_from_and_the_missing_one_said(copy, whole):
    shutil.rmtree(checkpoints_in(copy) / "3")
    found, said = run_to(copy, 3)
    assert f"Step 3 was saved, and {checkpoints_in(copy)} does not have it any more." in said
    assert found == whole[1][2:]


def test_what_kills_leave_is_removed_and_said(copy, whole):
    checkpoints = checkpoints_in(copy)
    left = [
        checkpoints / "4.unsealed.orbax-checkpoint-tmp",
        checkpoints / "4.unsealed",
        checkpoints / ".removed" / "1",
        checkpoints / "1.incomplete",
    ]
    for folder in left:
        shutil.copytree(checkpoints / "2" / "state", folder / "state")
    (checkpoints / "7.incomplete").mkdir()
    _, said = run_to(copy, 4)
    for folder in left:
        assert f"Removed {folder}, a part of " in said and not folder.exists()
    assert (checkpoints / "7.incomplete").exists()  # no newer checkpoint has what it may hold


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("metrics.jsonl", lambda text: text.replace(b"4.7", b"4.6", 1)),
        ("metrics.jsonl", lambda text: text[len(text) // 2 :]),
        ("starts.jsonl", lambda text: text.replace(b'"first_step": 1', b'"first_step": 2')),
    ],
)
def test_a_history_that_is_not_what_the_run_wrote_is_refused(copy, name, harm):
    file = copy / "default" / name
    file.write_bytes(harm(file.read_bytes()))
    before = content_of(copy)
    with pytest.raises(ValueError, match=rf"{file} is not what it was when step 3 was saved: "):
        run_to(copy, 4)
    assert content_of(copy) == before
    file.unlink()
    with pytest.raises(ValueError, match=r"are missing or have changed\. Put the file back, or"):
        run_to(copy, 4)
    assert "resumed after step 3" in run_to(copy, 4, allow_unverified=True)[1]


def test_lines_behind_the_checkpoint_may_be_anything(copy, whole):
    flip_a_bit(checkpoints_in(copy) / "3")
    file = copy / "default" / "metrics.jsonl"
    file.write_bytes(file.read_bytes() + b'{"step": 4, \xff\n\0\0\n[[[')
    assert run_to(copy, 3)[0] == whole[1][2:]
    assert [line["step"] for line in read_metrics(file)] == [1, 2, 3]


def test_a_run_that_is_done_has_metrics_that_can_be_read(copy):
    file = copy / "default" / "metrics.jsonl"
    sound = file.read_bytes()
    file.write_bytes(b"\0" * 10 + sound[10:])
    with pytest.raises(ValueError, match=r"metrics\.jsonl line 1"):
        run_to(copy, 3)
    file.write_bytes(sound)
    assert "has all 3 steps" in run_to(copy, 3)[1]


def test_a_save_is_recorded_only_when_it_is_complete(tmp_path, monkeypatch):
    recorded, complete, replace = [], [], os.replace

    def watched(source: Path, destination: Path) -> None:
        replace(source, destination)
        folder = Path(destination).parent
        if Path(destination).name == "saved.json" and (step := read_saved(folder)):
            recorded.append(step)
            complete.append(is_complete(folder / "checkpoints" / str(step)))

    monkeypatch.setattr(os, "replace", watched)
    run_to(tmp_path, 3, max_to_keep=1)
    assert (recorded, complete) == ([1, 2, 3], [True] * 3)


def test_a_learning_rate_that_jumps_because_steps_grew_is_refused_before_anything_compiles(
    copy,
):
    grown = {"learning_rate_schedule_steps": -1}  # it was 6
    with pytest.raises(ValueError) as error:
        run_to(copy, 40, **grown)
    assert str(error.value) == (
        "The learning rate of step 4 was to be 0.0055 and would be 0.008: the schedule 'cosine' "
        "had 6 steps and has as many as `steps`, 40. Give `learning_rate_schedule_steps=6` to go "
        "on without a jump, or `allow_learning_rate_change=true` to go on with it."
    )
    said = run_to(copy, 7, **grown, allow_learning_rate_change=True)[1]
    assert "warning: The learning rate of step 4 was to be 0.0055 and would be " in said


@pytest.mark.parametrize(
    ("settings", "done"),
    [
        ({"learning_rate_schedule": "constant"}, 10),
        ({"learning_rate_schedule": "wsd"}, 10),  # it has not begun to fall
        ({"learning_rate_schedule_steps": 10}, 10),
        ({"learning_rate_schedule_steps": 40}, 10),  # a change by hand
    ],
)
def test_steps_may_grow_where_the_learning_rate_does_not_jump(settings, done):
    config = Config.model_validate({"steps": 40, **settings})
    assert check_learning_rate(20, config, done) == ""


def test_a_learning_rate_is_that_of_the_steps_that_were_not_skipped():
    config = Config(steps=40, learning_rate_schedule="wsd")
    assert check_learning_rate(20, config, 20, skipped=10) == ""
    with pytest.raises(ValueError, match="The learning rate of step 21 was to be"):
        check_learning_rate(20, config, 20)


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", "../x", "a/../../b", "/x/y", "a/b", "a\nb", "a\0b", "a\x1bb"]
)
def test_a_run_name_that_leaves_its_folder_is_refused(name):
    with pytest.raises(ValueError, match="the name of one folder inside `output_dir`"):
        Config(run_name=name)


def test_the_lock_does_not_follow_a_symbolic_link(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "default").mkdir()
    (tmp_path / "default" / LOCK_FILE).symlink_to(precious)
    with (
        pytest.raises(ValueError, match=r"lock' is a symbolic link"),
        locked_run_folder(tmp_path / "default"),
    ):
        pass
    assert precious.read_text() == "kept"


@pytest.mark.parametrize("name", ["metrics.jsonl", "starts.jsonl", "config.yml", "saved.json"])
def test_no_file_of_a_run_is_written_through_a_symbolic_link(copy, tmp_path, name):
    file, target = copy / "default" / name, tmp_path / "target"
    shutil.move(file, target)
    file.symlink_to(target)
    before = target.read_bytes()
    assert "resumed after step 3" in run_to(copy, 4)[1]
    assert target.read_bytes() == before and not file.is_symlink()
