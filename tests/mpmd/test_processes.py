"""Steps over several processes: right, never stuck, and ended by name when they cannot go on."""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from .process_rows import ROWS, num_devices
from .processes import run_processes

pytestmark = pytest.mark.ci

SCRIPT = Path(__file__).parent / "steps_script.py"
TIMEOUT = 5.0  # of the script


def check_rows(num_processes: int, names: str, seconds: float) -> None:
    rows = ROWS[names]()
    (devices,) = {num_devices(row) // num_processes for row in rows}
    ended = run_processes(SCRIPT, f"rows:{names}", num_processes, seconds=seconds, devices=devices)
    logs = "\n".join(f"--- process {p}, code {end.code}: {end.err}" for p, end in enumerate(ended))
    for end in ended:
        assert end.code == 0, logs
        assert end.out.count("leaves are right") == len(rows)


def test_two_processes_compute_what_one_computes():
    check_rows(2, "few", 240)


def test_weights_of_two_processes_are_made_apart_and_go_over_all_devices_and_back():
    for end in run_processes(SCRIPT, "apart", 2, seconds=120, devices=2):
        assert end.code == 0, end.err
        assert "every shard is right" in end.out


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 4])
@pytest.mark.parametrize("names", ["every", "sharded"])
def test_every_schedule_runs_over_processes(num_processes, names):
    check_rows(num_processes, names, 1500)


def check_delays(num_processes: int, steps: int) -> None:
    ended = run_processes(
        SCRIPT, f"delays:{steps}", num_processes, seconds=60 + 2 * steps, devices=1
    )
    assert [end.code for end in ended] == [0] * num_processes, ended[0].err
    assert all(f"{steps} steps are equal" in end.out for end in ended)
    # A thread that held arrays when Python ends aborted in one of 80 runs.
    assert all("at exit: ['MainThread']" in end.out for end in ended), ended[0].out


def test_delays_change_nothing():
    check_delays(2, 10)


@pytest.mark.slow
def test_a_hundred_steps_with_delays_on_four_processes_neither_hang_nor_differ():
    check_delays(4, 100)


def test_an_optimizer_of_two_processes_is_that_of_the_plain_program():
    """Its state was made by process 0 alone, which has no weights of the second stage."""
    for end in run_processes(SCRIPT, "optimizer", 2, seconds=120, devices=1):
        assert end.code == 0, end.err
        assert "optimizer is right" in end.out


def test_an_exception_of_one_process_ends_all():
    """JAX would wait five minutes for the others, and they for what is not sent."""
    waits, raises = run_processes(SCRIPT, "raises", 2, seconds=60, devices=1)
    assert raises.code == 1 and "RuntimeError: no more data" in raises.err
    assert waits.code != 0 and "process 1" in waits.err, waits.err


def test_processes_with_other_programs_say_so_before_the_first_step():
    for end in run_processes(SCRIPT, "differ", 2, seconds=60, devices=1):
        assert end.code != 0
        assert "Processes differ" in end.err and "[0]" in end.err and "[1]" in end.err


def test_processes_that_differ_in_what_travels_say_so_before_the_first_step():
    """The third has no such route, and hears of it too."""
    ended = run_processes(SCRIPT, "meshes", 3, seconds=120, devices=2)
    message = (
        "Of channel 1 from rank 0 to rank 1, behind fwd_0__0, they say: "
        "float32[2, 8] as [0:1,0:8 | 1:2,0:8] on [0]; float32[2, 8] as [0:2,0:8 | 0:2,0:8] on [1]."
    )
    for end in ended:
        assert end.code != 0
        assert "ValueError: Processes differ" in end.err and message in end.err, end.err


LEAVES = [
    "script:1",
    "child:1",
    *(pytest.param(case, marks=pytest.mark.slow) for case in ("script:0", "child:0")),
]


@pytest.mark.parametrize("case", LEAVES)
def test_a_process_that_ends_first_waits_for_the_last_step_of_the_others(case: str):
    """The loss is in process 1: the other prints what it knows of it. One ends 3 seconds early."""
    script = SCRIPT.with_name("leave_script.py")
    first, second = run_processes(script, case, 2, seconds=60, devices=1)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "first step, losses MpmdArray(shape=(6,), dtype=float32, mpmd_idxs=(1,)" in first.out
    loss = 2 * 4 * np.tanh(np.tanh(1.0)) ** 2
    numbers = second.out.split("losses [")[1].split("]")[0].split()
    np.testing.assert_allclose(np.array(numbers, float), [loss] * 6, rtol=1e-5)


@pytest.mark.slow
def test_prints_come_once_for_each_microbatch_from_the_process_that_has_the_stage():
    """The numbers are those that one process computes by hand."""
    ended = run_processes(SCRIPT, "prints", 2, seconds=120, devices=1)
    x, lines = np.ones((3, 2, 4)) * np.arange(1.0, 4.0)[:, None, None], []
    for stage in range(2):
        x = np.tanh(x)
        lines.append([f"stage {stage} of {of_m.sum():.3f}" for of_m in x])
    lines[1].append(f"loss {(x**2).sum():.3f}")
    for end, expected in zip(ended, lines, strict=True):
        assert end.code == 0, end.err
        assert Counter(end.out.splitlines()) == Counter(expected * 2)


def test_a_step_that_stands_still_ends_with_the_name_of_what_it_waits_for():
    def release(running) -> None:
        # The frozen process cannot end itself; it goes once the other has.
        if running[0].poll() is not None:
            running[1].kill()

    first, _ = run_processes(SCRIPT, "stuck", 2, seconds=60 + 3 * TIMEOUT, devices=1, watch=release)
    assert first.code != 0
    assert "on rank 0" in first.err or "rank 0's receive" in first.err
    assert "has not finished within 5.0 seconds" in first.err


def check_kill(num_processes: int, victim: int, after: float, folder: Path) -> None:
    """Kills a process in the middle of a step, some seconds after all have begun: the others end,
    with a reason, in bounded time."""
    began, stepping, killed = time.monotonic(), list[float](), list[float]()

    def kill(running) -> None:
        now = time.monotonic() - began
        if not stepping and len(list(folder.iterdir())) == num_processes:
            stepping.append(now)
        if stepping and not killed and now > stepping[0] + after:
            running[victim].send_signal(signal.SIGKILL)
            killed.append(now)

    case, seconds = f"forever:{folder}", after + 120
    ended = run_processes(SCRIPT, case, num_processes, seconds=seconds, devices=1, watch=kill)
    for process, end in enumerate(ended):
        if process == victim:
            assert end.code == -signal.SIGKILL
            continue
        assert end.code != 0
        assert end.seconds - killed[0] < 2 * TIMEOUT
        assert f"jaxpipe: process {process}:" in end.err, end.err


def test_when_a_process_dies_the_others_end_and_say_why(tmp_path):
    check_kill(2, 1, 1.0, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("run", range(20))
def test_whoever_dies_whenever_the_others_end_and_say_why(run, tmp_path):
    rng = random.Random(run + os.getpid())
    check_kill(4, rng.randrange(4), 10 * rng.random(), tmp_path)
