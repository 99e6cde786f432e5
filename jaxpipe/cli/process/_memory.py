"""The memory of a process: refuses too small an address space, and keeps memory that is freed."""

import ctypes
import os
import resource
import sys

from ...devices import num_cores

_LIBRARIES_BYTES = 2.1e9
"""The address space of the libraries of a run on one device, as measured with jax 0.10.2."""

_STACKS_PER_THREAD = 4
"""Pools of XLA, each with a stack for every thread: two with jax 0.10.2. With 0.12 a run on
8 emulated devices aborts in 4.1 GB, and 4.25 are enough."""

_USUAL_STACK_BYTES = 8 << 20


def check_address_space(num_emulated: int = 0) -> None:
    """Checks that libraries and XLA's threads fit into the address space of this process."""
    # Where a thread or its stack cannot be made, XLA and LLVM abort without a word of the limit.
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return
    threads = _num_threads(num_emulated)
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if stack == resource.RLIM_INFINITY:
        stack = _USUAL_STACK_BYTES
    needed = _LIBRARIES_BYTES + _STACKS_PER_THREAD * threads * stack
    if limit < needed:
        raise ValueError(
            f"The address space of this process is limited to {limit / 1e9:.1f} GB (`ulimit -v`). "
            f"Libraries and the stacks of XLA's {threads} threads need {needed / 1e9:.1f} GB, and "
            f"the model comes on top. Raise the limit: `ulimit -v {needed / 512:.0f}` has room for "
            "both if the model is small."
        )


def _num_threads(num_emulated: int) -> int:
    nproc = os.environ.get("NPROC", "")
    return max(int(nproc) if nproc.isdigit() else num_cores(), num_emulated)


# Names and numbers of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory for the next allocation, up to 1 GiB at the end of its heap."""
    # XLA:CPU allocates the temporaries of a program whenever it runs. By default glibc asks the
    # kernel for large ones, and returns them: every call then takes a page fault for each 4 KiB. Of
    # a step of matrix products with 40 MB of temporaries that was a tenth of the CPU time. The
    # process holds some more memory for it, which is why a library does not do it on its own.
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
