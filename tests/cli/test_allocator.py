"""Freed memory that a process keeps, in a process of its own."""

import subprocess
import sys

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
