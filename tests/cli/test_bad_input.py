"""What users get wrong on the command line: one message that names it, and nothing unbounded."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from campaign.world import GOLDEN

from jaxpipe.cli import main
from jaxpipe.cli.process import report_error
from jaxpipe.hugging_face.folders import atomic_folder
from jaxpipe.train import Config, RunError, load_config

COUNTS = ["--ranks", "2", "--microbatches", "2"]


def failure(capsys, *argv: object, code: int = 2) -> str:
    assert main([*map(str, argv)]) == code
    said = capsys.readouterr().err
    assert said.startswith("jaxpipe: error: ")
    assert len(said) < 4100
    return said


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"0F0,0B0 # \xe9", "is not UTF-8: byte 0xe9 in line 1"),
        (b"0F0," + b"x" * 300_000, "Row 1: field larger than field limit"),
        (b"0F0,0B0\n" * 1_000_000, "There are 1000000 rows, one for each rank. Give at most 4096"),
        (b"999999999F0,0F0", "The actions are of 1000000000 stages, and there are 2 of them"),
        (b"0F0s99999999", "of 100000000 slices, and there are 1 of them"),
    ],
)
def test_a_schedule_csv_that_is_broken_or_huge_is_named(
    tmp_path: Path, capsys, content: bytes, message: str
):
    file = tmp_path / "s.csv"
    file.write_bytes(content)
    assert message in failure(capsys, "schedule", "check", file)


def test_what_is_no_regular_file_is_not_read(tmp_path: Path, capsys):
    loop = tmp_path / "loop.csv"
    loop.symlink_to("loop.csv")
    os.mkfifo(tmp_path / "fifo.yml")
    assert "is a folder. Give a file" in failure(capsys, "schedule", "check", tmp_path)
    assert "Too many levels of symbolic" in failure(capsys, "schedule", "check", loop)
    assert "is a device or a pipe" in failure(capsys, "schedule", "check", "/dev/zero")
    assert "is a device or a pipe" in failure(capsys, "train", tmp_path / "fifo.yml")


@pytest.mark.parametrize("option", ["--svg", "--trace", "--csv"])
def test_a_picture_that_cannot_be_written_is_named_by_its_option(capsys, option: str):
    command = "export" if option == "--csv" else "show"
    message = failure(capsys, "schedule", command, "1f1b", *COUNTS, f"{option}=/dev/null/x")
    assert f"`{option}` is '/dev/null/x', which cannot be written: Not a directory" in message


def test_schedules_speak_of_options_and_are_bounded(capsys):
    with pytest.raises(SystemExit):
        main(["schedule", "show", "1f1b", "--ranks", "0", "--microbatches", "2"])
    assert "argument --ranks: '0'. Give an integer from 1" in capsys.readouterr().err
    counts = ["--ranks", "4000", "--microbatches", "9000000"]
    message = failure(capsys, "schedule", "show", "1f1b", *counts)
    assert "`--ranks` 4000 x `--microbatches` 9000000" in message
    counts = ["--ranks", "3", "--microbatches", "6"]
    assert "`--ranks` is 3, which is odd" in failure(
        capsys, "schedule", "show", "dualpipe", *counts
    )


@pytest.mark.parametrize(
    ("argv", "option"),
    [
        (["convert", "a", "b", "--max-length", "-5"], "--max-length: '-5'"),
        (["report", "a", "--num-slices", "-1"], "--num-slices: '-1'"),
        (["launch", "--processes", "2", "--grace", "nan"], "--grace: 'nan'"),
        (["schedule", "show", "1f1b", "--latency", "inf"], "--latency: 'inf'"),
        (["compile", "--hosts", "8"], "`jaxpipe compile --help` lists the options"),
        ([], "spread a training step over devices"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(capsys, argv: list[str], option: str):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert option in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("base_num_decoder_layers=1000000000", "less than or equal to 10000"),
        ("emulate_devices=20000", "less than or equal to 1024"),
        ("steps=" + "[" * 5000, "is nested too deeply"),
        ("steps=" + "9" * 5000, "cannot be read as int"),
        ("data_files=[&a [x], *a]", "`data_files` is [['x'], ['x']]"),
        ("run_name=!!timestamp x", "tags that would make Python objects"),
        ("mpmd_timeout_seconds=1e300", "less than or equal to 1000000000"),
        ("base_emb_dim=2000000", "`base_emb_dim` 2000000, `base_mlp_dim` 192"),
        ("per_device_batch_size=1e12", "(1000000000000 sequences x 4 heads"),
    ],
)
def test_a_value_that_is_too_large_or_too_deep_is_refused(
    capsys, tmp_path: Path, setting: str, message: str
):
    assert message in failure(capsys, "train", setting, f"output_dir={tmp_path}")


def test_a_layout_that_is_written_out_too_long_is_refused(capsys):
    settings = ["pipeline_engine=scheduled", "pipeline_layout=Et*99999999999L"]
    assert "has more than 100000 layers and stages" in failure(capsys, "train", *settings)


def test_aliases_that_multiply_are_refused_in_a_line(tmp_path: Path, capsys):
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    file = tmp_path / "laughs.yml"
    file.write_text("\n".join(lines))
    message = failure(capsys, "train", file)
    assert "repeats itself by aliases more than 500,000 times" in message


def config(*overrides: str) -> Config:
    return load_config(overrides=overrides, presets={"llama-tiny": {}})


def test_numbers_are_what_they_look_like():
    assert config("profile_steps=10:12").profile_steps == "10:12"
    assert config("steps=010").steps == 10
    assert config("run_name=7").run_name == "7"
    assert config("run_name=2026-01-01").run_name == "2026-01-01"


def test_settings_may_stand_after_options_and_end_like_files(capsys):
    argv = ["compile", "steps=3", "--num-slices", "2", "tokenizer_path=x.yml", "steps=0"]
    message = failure(capsys, *argv)
    assert "`steps` is 0 (from the command line)" in message


def test_converting_into_a_link_loop_is_refused(tmp_path: Path, capsys):
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    assert f"{loop} is there already" in failure(capsys, "convert", GOLDEN / "llama2", loop)
    inside = loop / "new"
    assert "Nothing can be written to" in failure(capsys, "convert", GOLDEN / "llama2", inside)


def test_two_commands_that_convert_to_one_folder_do_not_mix(tmp_path: Path):
    with pytest.raises(ValueError, match="is there now, which it was not before: another command"):  # noqa: SIM117
        with atomic_folder(tmp_path / "x") as first:
            (first / "theirs").touch()
            with atomic_folder(tmp_path / "x") as second:
                (second / "ours").touch()
    assert [file.name for file in (tmp_path / "x").iterdir()] == ["ours"]
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


def test_files_that_are_written_after_an_error_are_removed_too(tmp_path: Path):
    written = threading.Event()

    def write_late(folder: Path):
        time.sleep(0.1)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "late").touch()
        written.set()

    with (
        pytest.raises(RunError, match="could not be written"),
        atomic_folder(tmp_path / "x") as new,
    ):
        threading.Thread(target=write_late, args=[new]).start()
        raise OSError(errno.ENOSPC, "No space left on device")
    assert written.is_set()
    assert [*tmp_path.iterdir()] == []


FULL_DISK = """
import resource, sys
import jaxpipe.train
from jaxpipe.cli import script
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
script()
"""


def test_a_disk_that_is_full_ends_a_conversion_and_leaves_nothing(tmp_path: Path):
    words = ["convert", str(GOLDEN / "llama2"), str(tmp_path / "out")]
    ended = subprocess.run(
        [sys.executable, "-c", FULL_DISK, *words], capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 1, ended.stderr
    assert f"jaxpipe: error: {tmp_path / 'out'} could not be written" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert [*tmp_path.iterdir()] == []


def test_a_tokenizer_without_its_token_for_unknown_words_is_named(tmp_path: Path, capsys):
    file = tmp_path / "tokenizer.json"
    file.write_text(
        '{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], '
        '"normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, '
        '"decoder": null, "model": {"type": "WordLevel", "vocab": {"</s>": 0}, '
        '"unk_token": "[UNK]"}}'
    )
    settings = ["dataset_type=text", f"tokenizer_path={file}"]
    message = failure(capsys, "tokenize", tmp_path / "x.bin", *settings)
    assert "The tokenizer cannot encode 'From fairest" in message or "[UNK]" in message


@pytest.mark.parametrize(
    "text", ['{"step": ' + "[" * 50_000, '{"step": 1, "n": ' + "1" * 9000 + "}", '{"step": -1}']
)
def test_a_line_of_metrics_that_is_hostile_is_named(tmp_path: Path, capsys, text: str):
    (tmp_path / "config.yml").write_text("steps: 3\n")
    (tmp_path / "metrics.jsonl").write_text(text + "\n")
    assert "metrics.jsonl line 1" in failure(capsys, "report", tmp_path)


def test_metrics_that_are_a_folder_are_refused(tmp_path: Path, capsys):
    (tmp_path / "config.yml").write_text("steps: 3\n")
    (tmp_path / "metrics.jsonl").mkdir()
    assert "has no metrics.jsonl" in failure(capsys, "report", tmp_path)


def test_what_nobody_has_foreseen_is_one_line_with_a_file(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert report_error(KeyError("x"), "train") == 1
    said = capsys.readouterr().err
    assert said.startswith("jaxpipe: error: this is a bug of jaxpipe, in `jaxpipe train`: KeyError")
    (file,) = tmp_path.iterdir()
    assert str(file) in said and "KeyError" in file.read_text()


def test_errors_of_the_system_have_the_code_of_their_cause(capsys):
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", "x")
    assert report_error(missing, "train") == 2
    assert report_error(OSError(errno.ENOSPC, "No space left on device", "x"), "train") == 1
    assert report_error(MemoryError(), "train") == 1
    assert "`base_emb_dim`" in capsys.readouterr().err


def test_a_reader_that_has_enough_is_no_error():
    words = [sys.executable, "-m", "jaxpipe", "schedule", "list"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as ended:
        assert ended.stdout is not None and ended.stderr is not None
        ended.stdout.close()
        assert ended.stderr.read() == b""
