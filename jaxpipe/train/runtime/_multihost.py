"""What the processes of a run do together. All of them call these, in the same order."""

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_first_process() -> bool:
    """Whether this is the process that writes and shows what is no checkpoint."""
    return jax.process_index() == 0


def broadcast_from_first(number: int) -> int:
    """What the first process says, on all of them: a clock or a folder may look different."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def any_process(flag: bool) -> bool:
    """Whether a process says so, on all of them."""
    return bool(max_over_processes(int(flag)))


def max_over_processes(number: int) -> int:
    """Returns the largest of the numbers that the processes give.

    Collective: every process must call it and receives the same answer.

    Args:
        number: The number of this process, an int32.
    """
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.process_allgather(np.int32(number)).max())


def barrier(why: str) -> None:
    """Goes on when all are here.

    Args:
        why: The same on all of them.
    """
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(why)
