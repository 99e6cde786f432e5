"""What a process keeps of the memory that compilers have freed."""

import ctypes
import sys
import threading
from pathlib import Path

import pytest

from jaxpipe.mpmd import mpmd_jit_with_loop
from jaxpipe.mpmd.jaxpp import Std1F1B
from mpmd.small import batch, gradients, groups, layers

BLOCK, COUNT = 100_000, 2000  # bytes, small enough for an arena


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's arenas")
def test_memory_that_was_freed_in_another_thread_is_the_systems_once_a_step_is_compiled():
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    libc.free.argtypes = (ctypes.c_void_p,)
    kept: list[int] = []

    def fill() -> None:
        blocks = [libc.malloc(BLOCK) for _ in range(COUNT)]
        for block in blocks:
            ctypes.memset(block, 1, BLOCK)
        for i, block in enumerate(blocks):
            kept.append(block) if i % 20 == 0 else libc.free(block)  # what is between stays

    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
    before = resident_bytes()
    mpmd_jit_with_loop(gradients(Std1F1B(2)), groups(2)).compile(layers(2), *batch(2))
    returned = before - resident_bytes()
    for block in kept:
        libc.free(block)
    assert returned > BLOCK * COUNT / 4  # of 19 in 20; what compiling has needed comes back too
