"""Processes that find each other: addresses, transfer servers, and checks that all mean the same.

They meet in the key-value store of `jax.distributed`. What they tell each other there stays for the
life of the job, so every name is used once.
"""

import functools
import json
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import transfer

from ..._compat import distributed_state

CHUNK_BYTES = 1 << 24
"""How much of an array travels at a time."""
NUM_CHUNKS = 8
"""How many chunks travel at a time. A server reserves host memory for three times as many."""
NUM_SOCKETS = 4
"""How many connections they share."""


@dataclass(frozen=True)
class Transport:
    """The end in this process of all transfers.

    Attributes:
        process: The index of this process.
        timeout: How long to look for a peer, in seconds.
        server: From which peers pull. A `jax.experimental.transfer.TransferServer`.
    """

    process: int
    timeout: float
    server: Any


@functools.cache
def open_transport(timeout: float, host: str | None = None) -> Transport:
    """Starts the transfer server of this process and tells the others its address. Once.

    Args:
        timeout: How long to look for a peer, in seconds.
        host: The address at which peers reach this host: if not given, the one from which this
            host reaches process 0.

    Raises:
        ValueError: If `jax.distributed` is not initialised.
    """
    host = host or _own_host()
    # Without addresses of its own for the bulk of the data, a server dies when it is connected to
    # from another process (`Check failed: fd_ == -1`).
    bulk = [f"{host}:0"] * NUM_SOCKETS
    server = transfer.start_transfer_server(
        jax.local_devices()[0].client,
        f"{host}:0",
        bulk,
        max_num_parallel_copies=NUM_CHUNKS,
        transfer_size=CHUNK_BYTES,
    )
    tell("address", server.address())
    return Transport(jax.process_index(), timeout, server)


@functools.cache
def connect(transport: Transport, peer: int) -> Any:
    """The connection through which this process pulls from a peer.

    Raises:
        TimeoutError: If the peer does not open its transport in time.
    """
    addresses = ask("address", [peer], transport.timeout)
    if peer not in addresses:
        raise TimeoutError(
            f"Process {peer} has not opened its transport within {transport.timeout} seconds. "
            "It may be slow to start, or it has died: its log says which."
        )
    return transport.server.connect(addresses[peer])


def check_same_program(digest: str, name: str, *, timeout: float) -> None:
    """Checks that all processes are about to run the same program. All of them call it.

    Args:
        digest: Of the program of this process.
        name: Of the program, given to no other one in this job.
        timeout: How long to wait for the other processes, in seconds.

    Raises:
        ValueError: On every process, naming those whose programs differ.
        TimeoutError: Naming the processes that have not called it in time.
    """
    check_agreement(name, {"the program": digest}, range(jax.process_count()), timeout=timeout)


def check_agreement(
    name: str, facts: Mapping[str, str], processes: Iterable[int], *, timeout: float
) -> None:
    """Checks that processes say the same of everything of which several of them say something.

    Args:
        name: Of the occasion, the same on all processes and used once.
        facts: What this process says of what.
        processes: The others that matter to this one. All of them call this too.
        timeout: How long to wait for them, in seconds.

    Raises:
        ValueError: If two say different things of the same, naming it and them.
        TimeoutError: Naming the processes that have not called it in time.
    """
    here = jax.process_index()
    others = sorted({*processes} - {here})
    if not others:
        return
    mine = json.dumps(dict(facts))
    tell(f"facts/{name}", mine)
    told = ask(f"facts/{name}", others, timeout)
    late = [process for process in others if process not in told]
    if late:
        raise TimeoutError(
            f"Processes {late} have not come to `{name}` within {timeout} seconds. They run "
            "another script, are still compiling, or have died: their logs say which."
        )
    said: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for process, theirs in sorted((told | {here: mine}).items()):
        for fact, value in json.loads(theirs).items():
            said[fact][value].append(process)
    for fact, values in said.items():
        if len(values) > 1:
            sides = "; ".join(f"{value} on {of}" for value, of in values.items())
            raise ValueError(
                f"Processes differ in `{name}`. Of {fact} they say: {sides}. Run the same "
                "script with the same settings and the same versions on all of them."
            )


def tell(what: str, value: str) -> None:
    """Says something to all processes, once."""
    _distributed().client.key_value_set(f"jaxpipe/{what}/{jax.process_index()}", value)


def ask(what: str, processes: Iterable[int], timeout: float) -> dict[int, str]:
    """What processes tell, without those that have not told within `timeout` seconds."""
    client, deadline = _distributed().client, time.monotonic() + timeout
    told = {}
    for process in processes:
        left_ms = max(1, round(1000 * (deadline - time.monotonic())))
        try:
            told[process] = client.blocking_key_value_get(f"jaxpipe/{what}/{process}", left_ms)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
    return told


def _own_host() -> str:
    """The address of this host on the way to process 0."""
    host, port = _distributed().coordinator_address.rsplit(":", 1)
    family, kind, _, _, there = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(there)  # sends nothing: it only chooses the interface
        here = probe.getsockname()[0]
    return f"[{here}]" if family == socket.AF_INET6 else here


def _distributed() -> Any:
    """The state of `jax.distributed`, once there is one."""
    state = distributed_state()
    if state.client is None:
        raise ValueError(
            "Ranks are in several processes, and these do not know each other. Call "
            "`jax.distributed.initialize` before anything else."
        )
    return state
