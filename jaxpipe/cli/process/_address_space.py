"""Refuses an address space in which native code would abort before a run begins."""

import os
import resource

from ..._threads import num_threads_for

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
    if nproc.isdigit():
        return int(nproc)
    return num_threads_for(num_emulated) if num_emulated else len(os.sched_getaffinity(0))
