"""Collective operations on the processes of a run: all must call them in the same order."""

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_first_process() -> bool:
    """Returns whether this process is the one that writes logs and shows progress."""
    return jax.process_index() == 0


def broadcast_from_first(value: int) -> int:
    """Broadcasts an int32 of the first process: clocks and folders may differ between hosts."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def any_process(flag: bool) -> bool:
    """Returns whether the flag of any process is set."""
    return bool(max_over_processes(int(flag)))


def max_over_processes(value: int) -> int:
    """Returns the largest number of all processes, which must all call it."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.process_allgather(np.int32(value)).max())


def barrier(why: str) -> None:
    """Waits until all processes have called this function."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(why)
