"""The processes of a job: how one joins the others, and leaves them when it fails."""

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESS = "JAX_COORDINATOR_ADDRESS"
NUM_PROCESSES, PROCESS = "JAXPIPE_NUM_PROCESSES", "JAXPIPE_PROCESS_ID"

TERMINATED = 128 + signal.SIGTERM
"""The exit code of what SIGTERM has ended, as shells have it."""


def join_processes(*, detect: bool) -> None:
    """Connects this process with the others of its job, if there are any, before it uses devices.

    It is one of several if `JAXPIPE_NUM_PROCESSES` says how many there are, `JAXPIPE_PROCESS_ID`
    which of them it is, and `JAX_COORDINATOR_ADDRESS` the host:port at which process 0 is reached.

    Args:
        detect: Whether it is one without these: of a job of SLURM, Kubernetes, Open MPI or a TPU
            pod, of which JAX reads everything from the environment.

    Raises:
        ValueError: If the environment says less.
    """
    import jax  # not at the top: most commands need no devices

    if NUM_PROCESSES in os.environ:
        num_processes, process = _number(NUM_PROCESSES), _number(PROCESS)
        if ADDRESS not in os.environ:
            raise ValueError(
                f"{NUM_PROCESSES} is set and {ADDRESS} is not. Set it to the host:port at which "
                "process 0 can be reached."
            )
        jax.distributed.initialize(
            num_processes=num_processes, process_id=process, cluster_detection_method="deactivate"
        )
    elif detect:
        try:
            jax.distributed.initialize()
        except ValueError as error:
            raise ValueError(
                f"`distributed` is true, but JAX finds no job around this process ({error}) Start "
                "it by srun, mpirun or in an indexed Kubernetes job; or set "
                f"{NUM_PROCESSES}, {PROCESS} and {ADDRESS}; or use `jaxpipe launch`."
            ) from None


@contextmanager
def leaving_on_error() -> Iterator[None]:
    """Ends the process if something fails that the others of its job do not know of.

    They wait for it somewhere, so it must not wait for them, as JAX does at exit.
    """
    try:
        yield
    except BaseException as error:
        import jax

        if not jax.distributed.is_initialized():
            raise
        if isinstance(error, ValueError) or is_run_error(error):
            print(f"jaxpipe: error: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2 if isinstance(error, ValueError) else 1)


def is_run_error(error: BaseException) -> bool:
    """Whether a run has ended by a reason that needs no traceback."""
    from ..data import LostFileError
    from ..train import RunError  # not at the top: it imports JAX

    return isinstance(error, RunError | LostFileError)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdigit():
        raise ValueError(f"{name} is {text!r} and {NUM_PROCESSES} is set. Give a number.")
    return int(text)
