"""Counts the cores of a process, and gives XLA enough threads for several emulated CPU devices.

A program on several devices that has started on one of them occupies a thread of XLA's pool while
it waits for the others. If all threads wait, the programs that they wait for cannot start.
"""

import os
import re
import sys
from collections.abc import Mapping

THREADS_PER_DEVICE = 4
MIN_THREADS = 64


def num_threads_for(num_devices: int) -> int:
    """Returns the number of threads with which groups of CPU devices never wait in a circle."""
    return max(MIN_THREADS, THREADS_PER_DEVICE * num_devices)


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux alone has it
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_num_threads() -> None:
    """Sets `NPROC` if JAX is about to emulate several CPU devices and the caller has not set it.

    XLA reads the variable when JAX first uses a device. A later change has no effect, and
    `check_threads` would read a number that is not in force.
    """
    num_devices = _emulated_devices(os.environ)
    if "jax" in sys.modules:
        from ._compat import cpu_devices_asked_for, devices_are_known

        if devices_are_known():
            return
        num_devices = max(num_devices, cpu_devices_asked_for())
    if num_devices > 1:
        os.environ.setdefault("NPROC", str(num_threads_for(num_devices)))


def _emulated_devices(environment: Mapping[str, str]) -> int:
    flag = r"--xla_force_host_platform_device_count=(\d{1,9})"
    counts = re.findall(flag, environment.get("XLA_FLAGS", ""))
    asked = environment.get("JAX_NUM_CPU_DEVICES", "")
    return max(int(counts[-1]) if counts else 0, int(asked) if asked.isdigit() else 0)
