"""`jaxpipe launch` from the outside: runs over processes, and what is left when one dies."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpipe.cli import main
from jaxpipe.cli.job import (
    ADDRESS,
    EXIT_CODE,
    NUM_PROCESSES,
    PROCESS,
    Job,
    Lifelines,
    bind_address,
    first_failure,
    join_processes,
)
from quick import ENVIRONMENT

from . import kills
from .runs import SMALL, losses, run_jaxpipe

pytestmark = pytest.mark.ci

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
        ((0, 0), "", 0, ""),
        ((143, 143), "SIGTERM", 143, ""),
        ((130, 130), "SIGINT", 130, ""),
        ((129, 129), "SIGHUP", 129, ""),
        ((143, -15), "SIGTERM", 143, ""),  # before it joined the others
        ((143, 1), "SIGTERM", 1, "process 1 has ended with code 1."),
        ((143, 143), "", 143, ""),  # one of them was told, and all have stopped
        ((143, 0), "", 143, "process 0 has ended with code 143."),
        ((0, -9), "", 137, "process 1 has ended by SIGKILL."),
        ((1, -9), "", 137, "process 1 has ended by SIGKILL."),  # and 0 because of it
        ((70, -6, 1), "", 1, "process 2 has ended with code 1."),
    ],
)
def test_the_exit_code_is_that_of_the_first_process_that_was_not_told_to_end(
    codes, signals, code, said, capsys
):
    running: list[Any] = [Ended(code) for code in codes]
    told = [signal.Signals[name] for name in signals.split()]
    assert first_failure(Job(running, signals=told), grace=0) == code
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
    with pytest.raises(SystemExit):
        main(["launch", "--processes", "0"])
    said = capsys.readouterr().err
    assert "argument --processes: '0'. Give an integer from 1 to 1,024." in said


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({NUM_PROCESSES: "two"}, f"{NUM_PROCESSES} is 'two'"),
        ({NUM_PROCESSES: "0", PROCESS: "0", ADDRESS: "localhost:1"}, f"{NUM_PROCESSES} is 0. Give"),
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


@pytest.mark.parametrize(
    "address", ["garbage", "host:", ":1234", "host:0", "host:70000", "a b:1", "host:1:2", "::1"]
)
def test_an_address_that_is_none_is_refused_before_anything_waits_for_it(
    address, monkeypatch, capsys
):
    monkeypatch.setenv(ADDRESS, address)
    assert main(["train"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"jaxpipe: error: {ADDRESS} is {address!r}. Give the host:port at")


def test_process_0_listens_at_the_address_that_it_is_given_if_that_is_one_of_its_host(capsys):
    assert bind_address("127.0.0.1:54321") == "127.0.0.1:54321"
    assert bind_address("localhost:54321") in ("127.0.0.1:54321", "[::1]:54321")
    assert capsys.readouterr().err == ""
    assert bind_address("192.0.2.77:54321") is None  # an address of no host
    assert (
        "process 0 listens at port 54321 of all addresses of this host" in capsys.readouterr().err
    )
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ValueError, match="another program listens there"):
            bind_address(address)


def test_a_process_follows_its_launcher_and_hears_of_others(tmp_path):
    code = "from jaxpipe.cli.job import follow_launcher; import time; "
    code += "follow_launcher('process 7'); time.sleep(60)"
    lifelines = Lifelines()
    running = [
        lifelines.start(i, [sys.executable, "-c", code], os.environ, stderr=subprocess.PIPE)
        for i in range(2)
    ]
    try:
        lifelines.notify_others(1, "by SIGKILL")
        _, said = running[0].communicate(timeout=60)
        assert said == b"jaxpipe: process 7: process 1 has ended by SIGKILL, so this process ends\n"
        lifelines.close()
        _, said = running[1].communicate(timeout=60)
        assert said == b"jaxpipe: process 7: the launcher has ended, so this process ends\n"
    finally:
        for popen in running:
            popen.kill()
    assert [popen.returncode for popen in running] == [EXIT_CODE, EXIT_CODE]


def test_no_process_survives_a_launcher_that_is_killed_even_one_that_is_stopped():
    sleeps = "from jaxpipe.cli.job import follow_launcher as f; f(''); print(1, flush=True); "
    sleeps += "import time; time.sleep(60)"
    code = f"""
import os, sys, time
from jaxpipe.cli.job import Lifelines
child = Lifelines().start(0, [sys.executable, "-c", {sleeps!r}], os.environ)
print(child.pid, flush=True)
time.sleep(60)
"""
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert launcher.stdout is not None
        child = int(launcher.stdout.readline())
        assert launcher.stdout.readline() == "1\n"  # of the child, when it follows
        os.kill(child, signal.SIGSTOP)
    finally:
        launcher.kill()
        launcher.communicate(timeout=60)
    kills.wait_until_none_runs([child], 30)


class Fails:
    """Starts what fails at once, some times, instead of training."""

    def __init__(self, code: int, times: int) -> None:
        self.code, self.left = code, times
        self.addresses: list[str] = []

    def __call__(self, settings, num_processes, num_gpus):
        del settings, num_gpus
        self.addresses.append(f"{len(self.addresses)}")
        code, self.left = (self.code, self.left - 1) if self.left else (0, 0)
        quits = [sys.executable, "-c", f"raise SystemExit({code})"]
        return [(quits, dict(os.environ))] * num_processes


@pytest.mark.parametrize(
    ("code", "times", "allowed", "starts", "ended"),
    [(1, 2, 5, 3, 0), (1, 9, 1, 2, 1), (2, 1, 5, 1, 2), (1, 1, 0, 1, 1)],
)
def test_a_job_starts_again_as_often_as_is_allowed_but_not_after_an_error_of_the_user(
    code, times, allowed, starts, ended, monkeypatch, capsys
):
    monkeypatch.setattr("jaxpipe.cli.commands._launch._commands", fails := Fails(code, times))
    words = ["launch", "--processes", "2", "--max-restarts", f"{allowed}"]
    assert main(words) == ended
    assert len(fails.addresses) == starts
    said = capsys.readouterr().err
    for restart in range(1, starts):
        line = f"starts again from its newest checkpoint: restart {restart} of {allowed}\n"
        assert line in said
    assert said.count("starts again") == starts - 1


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    "engine", ["", "pipeline_engine=scheduled pipeline_schedule=1f1b", "pipeline_engine=mpmd"]
)
def test_when_a_process_is_stuck_all_end_within_the_timeout_and_name_it(engine, victim, tmp_path):
    words = ["launch", "--processes", "2", "--grace", "10", *SETTINGS, *engine.split()]
    words += ["emulate_devices=1", "dcn_pipeline_parallelism=2", "per_device_batch_size=4"]
    words += ["enable_checkpointing=false", "step_timeout_minutes=0.2", "steps=1000000"]
    running = kills.start([*words, f"output_dir={tmp_path}"])
    try:
        kills.wait_for_steps(running, tmp_path)
        processes = running.processes()
        os.kill(processes[victim], signal.SIGSTOP)
        began = time.monotonic()
        assert running.end(120) == EXIT_CODE, running.said
        seconds = time.monotonic() - began
    finally:
        running.popen.kill()
    kills.wait_until_none_runs(processes, 30)
    name = (
        rf"jaxpipe: process {1 - victim}: no process has gone on for 1\d seconds, while this one "
    )
    name += rf"is in step \d+ \(\w+\): process {victim} has given no sign of life for \d+ seconds, "
    name += r"last heard of in step \d+ \((data|step)\)"
    assert re.search(name, running.said), running.said
    assert seconds < 12 + 10 + 30  # the timeout, the grace, and a machine that is busy


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mpmd on 2, fsdp 2", "circular on 2"])
def test_processes_show_the_sample_of_one_process(tmp_path, name):
    text = ["dataset_type=text", "eval_interval=1", "eval_steps=1", "eval_split_fraction=0.1"]
    text += ["sample_prompt=Thy", "sample_max_tokens=12"]

    def shown(name: str) -> str:
        said = run(name, tmp_path / name.replace(" ", ""), 1, *text)
        return said.partition("sample after step 1:")[2].strip()

    assert shown(name) == shown("none") != ""
