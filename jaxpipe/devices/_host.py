"""The memory and the cores of the host that this process may use."""

import os
import resource
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup/memory.max")


def host_bytes() -> int:
    """Returns the bytes of memory that this process may use at most."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    if _CGROUP.is_file() and (text := _CGROUP.read_text().strip()).isdigit():
        limits.append(int(text))
    return min(limits)


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux alone has it
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
