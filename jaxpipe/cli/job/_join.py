"""Joins a process with the others of its job, and ends it without them when it fails."""

import errno
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..process import report_error, say_interrupted

ADDRESS = "JAX_COORDINATOR_ADDRESS"
"""The environment variable with the host:port at which the others reach process 0."""
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
"""The environment variable with the host:port at which process 0 listens, if that is another."""
NUM_PROCESSES = "JAXPIPE_NUM_PROCESSES"
"""The environment variable with the number of processes of the job."""
PROCESS = "JAXPIPE_PROCESS_ID"
"""The environment variable with the index of this process, counted from 0."""

HEARTBEAT_SECONDS = 60
"""How long JAX waits for a heartbeat before it takes a process for dead and ends all others."""


def join_processes(*, detect: bool) -> None:
    """Connects this process with the others of its job, if there are any, before it uses devices.

    `JAXPIPE_NUM_PROCESSES` has the number of processes, `JAXPIPE_PROCESS_ID` the index of this one,
    and `JAX_COORDINATOR_ADDRESS` the host:port at which process 0 is reached. Without these,
    `detect` joins a job of SLURM, Kubernetes, Open MPI or a TPU pod, by what JAX reads in the
    environment.
    """
    import jax  # not at the top: most commands need no devices

    if ADDRESS in os.environ:
        check_address(os.environ[ADDRESS])
    if NUM_PROCESSES in os.environ:
        num_processes, process = _integer_variable(NUM_PROCESSES), _integer_variable(PROCESS)
        if ADDRESS not in os.environ:
            raise ValueError(
                f"{NUM_PROCESSES} is set and {ADDRESS} is not. Set it to the host:port at which "
                "process 0 can be reached."
            )
        if num_processes < 1:
            raise ValueError(f"{NUM_PROCESSES} is 0. Give the number of processes, at least 1.")
        if not process < num_processes:
            raise ValueError(
                f"{PROCESS} is {process} and {NUM_PROCESSES} is {num_processes}. Give an "
                "index of a process, counted from 0."
            )
        jax.distributed.initialize(
            num_processes=num_processes,
            process_id=process,
            cluster_detection_method="deactivate",
            coordinator_bind_address=None if process else bind_address(os.environ[ADDRESS]),
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    elif detect:
        try:
            jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
        except ValueError as error:
            raise ValueError(
                f"`distributed` is true, but JAX finds no job around this process ({error}) Start "
                "it by srun, mpirun or in an indexed Kubernetes job; or set "
                f"{NUM_PROCESSES}, {PROCESS} and {ADDRESS}; or use `jaxpipe launch`."
            ) from None


def check_address(address: str) -> None:
    """Checks that the address of process 0 is host:port."""
    host, _, port = address.rpartition(":")
    port_number = int(port) if port.isascii() and port.isdigit() and len(port) < 6 else 0
    is_host = re.fullmatch(r"\[[0-9a-fA-F:.%\w]+\]|[\w.-]+", host)
    if not is_host or not 0 < port_number < 1 << 16:
        raise ValueError(
            f"{ADDRESS} is {address!r}. Give the host:port at which process 0 can be reached, such "
            "as node0:55527 or [fd00::1]:55527."
        )


def bind_address(address: str) -> str | None:
    """Returns the address at which process 0 listens: the one at which the others reach it.

    It is None if `JAX_COORDINATOR_BIND_ADDRESS` is set, or if this host does not have the address,
    as behind network address translation: then process 0 listens at all addresses of its host.
    """
    if BIND_ADDRESS in os.environ:
        return None  # JAX reads it
    host, _, port = address.rpartition(":")
    try:
        family, kind, _, _, there = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(there)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"{ADDRESS} is {address!r}, and another program listens there. Give a free port."
            ) from None
        print(
            f"jaxpipe: process 0 listens at port {port} of all addresses of this host: {host!r} is "
            f"not one of them ({error.strerror or error}). Set {BIND_ADDRESS} to choose one.",
            file=sys.stderr,
        )
        return None
    bind_host = f"[{there[0]}]" if family == socket.AF_INET6 else there[0]
    return f"{bind_host}:{port}"


@contextmanager
def leaving_on_error() -> Iterator[None]:
    """Ends the process at once on an error inside, if its job has other processes."""
    # The others wait for this process in a collective, so it must not wait for them, as JAX does at
    # exit.
    try:
        yield
    except BaseException as error:
        import jax

        if not jax.distributed.is_initialized():
            raise
        if isinstance(error, KeyboardInterrupt):
            os._exit(say_interrupted())
        code = report_error(error, "train")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _integer_variable(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdigit():
        raise ValueError(f"{name} is {text!r} and {NUM_PROCESSES} is set. Give a number.")
    return int(text)
