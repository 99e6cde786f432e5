"""Freed memory that a process keeps, and its address space, in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = """
import resource, sys
from jaxpipe.cli.process import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(64 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = keep_freed_memory() if sys.argv[1] == "keep" else True
first, second = faults(), faults()
print(int(kept), second)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="is about glibc")
def test_memory_that_is_kept_costs_no_page_faults_a_second_time():
    def faults(what: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", FAULTS, what], capture_output=True, text=True, check=True
        )
        kept, second = map(int, done.stdout.split())
        assert kept
        return second

    given_back, kept = faults("give back"), faults("keep")
    assert given_back > 1000 > 10 * kept


def _train_within(kilobytes: int, folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    words = ["train", "steps=1", "base_num_decoder_layers=2", f"output_dir={folder}", *settings]
    command = [sys.executable, "-m", "jaxpipe", *words]
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    return subprocess.run(
        ["bash", "-c", f'ulimit -v {kilobytes}; exec "$@"', "bash", *command],
        env=environment,
        capture_output=True,
        text=True,
    )


def test_an_address_space_in_which_xla_would_abort_is_refused(tmp_path: Path):
    done = _train_within(1_500_000, tmp_path)
    assert done.returncode == 2
    assert "is limited to 1.5 GB (`ulimit -v`). Libraries and the stacks of XLA's" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), ("emulate_devices=8",)])
def test_the_address_space_that_is_said_to_be_needed_is_enough(tmp_path: Path, settings: tuple):
    refused = _train_within(1_500_000, tmp_path, *settings)
    (gigabytes,) = re.findall(r"threads need (\d+\.\d) GB", refused.stderr)
    kilobytes = round(float(gigabytes) * 1.05e9 / 1024)
    done = _train_within(kilobytes, tmp_path, *settings)
    assert done.returncode == 0, done.stderr[-2000:]
