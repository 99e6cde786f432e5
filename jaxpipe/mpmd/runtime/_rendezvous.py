"""Connects processes: addresses, transfer servers, and checks that all run the same program.

Processes exchange values through the key-value store of `jax.distributed`. A stored value remains
for the life of the job, so every key is used once.
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
"""Bytes of an array that are sent at a time."""
NUM_CHUNKS = 8
"""Number of chunks in flight. A server reserves host memory for three times as many."""
NUM_SOCKETS = 4
"""Number of connections that the chunks share."""


@dataclass(frozen=True)
class Transport:
    """The endpoint of all transfers in this process: peers pull from `server`."""

    process: int
    timeout: float
    server: Any


@functools.cache
def open_transport(timeout: float) -> Transport:
    """Starts the transfer server of this process and publishes its address, once."""
    host = _own_host()
    # Without separate addresses for bulk data, a server crashes when another process connects
    # to it (`Check failed: fd_ == -1`).
    bulk = [f"{host}:0"] * NUM_SOCKETS
    server = transfer.start_transfer_server(
        jax.local_devices()[0].client,
        f"{host}:0",
        bulk,
        max_num_parallel_copies=NUM_CHUNKS,
        transfer_size=CHUNK_BYTES,
    )
    kv_put("address", server.address())
    return Transport(jax.process_index(), timeout, server)


@functools.cache
def connect(transport: Transport, peer: int) -> Any:
    """Returns the connection through which this process pulls from a peer."""
    addresses = kv_get("address", [peer], transport.timeout)
    if peer not in addresses:
        raise TimeoutError(
            f"Process {peer} has not opened its transport within {transport.timeout} seconds. "
            "It may be slow to start, or it has died: its log says which."
        )
    return transport.server.connect(addresses[peer])


def check_same_program(digest: str, name: str, *, timeout: float) -> None:
    """Checks that all processes are about to run the same program; all of them must call it."""
    check_agreement(name, {"the program": digest}, range(jax.process_count()), timeout=timeout)


def check_agreement(
    name: str, facts: Mapping[str, str], processes: Iterable[int], *, timeout: float
) -> None:
    """Checks that processes report the same value for every fact that several of them report."""
    here = jax.process_index()
    peers = sorted({*processes} - {here})
    if not peers:
        return
    own_facts = json.dumps(dict(facts))
    kv_put(f"facts/{name}", own_facts)
    values = kv_get(f"facts/{name}", peers, timeout)
    missing = [process for process in peers if process not in values]
    if missing:
        raise TimeoutError(
            f"Processes {missing} have not come to `{name}` within {timeout} seconds. They run "
            "another script, are still compiling, or have died: their logs say which."
        )
    processes_by_value: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for process, reported in sorted((values | {here: own_facts}).items()):
        for fact, value in json.loads(reported).items():
            processes_by_value[fact][value].append(process)
    for fact, values in processes_by_value.items():
        if len(values) > 1:
            answers = "; ".join(f"{value} on {of}" for value, of in values.items())
            raise ValueError(
                f"Processes differ in `{name}`. Of {fact} they say: {answers}. Run the same "
                "script with the same settings and the same versions on all of them."
            )


def kv_put(what: str, value: str) -> None:
    """Stores a value of this process under a key, once; all processes can read it."""
    _distributed().client.key_value_set(f"jaxpipe/{what}/{jax.process_index()}", value)


def kv_get(what: str, processes: Iterable[int], timeout: float) -> dict[int, str]:
    """Returns the values that processes have stored under a key."""
    client, deadline = _distributed().client, time.monotonic() + timeout
    values = {}
    for process in processes:
        left_ms = max(1, round(1000 * (deadline - time.monotonic())))
        try:
            values[process] = client.blocking_key_value_get(f"jaxpipe/{what}/{process}", left_ms)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
    return values


def _own_host() -> str:
    """Returns the address of the network interface through which this host reaches process 0."""
    host, port = _distributed().coordinator_address.rsplit(":", 1)
    family, kind, _, _, there = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(there)  # sends nothing: it only chooses the interface
        here = probe.getsockname()[0]
    return f"[{here}]" if family == socket.AF_INET6 else here


def _distributed() -> Any:
    """Returns the state of `jax.distributed`, or raises a `ValueError` if it is not initialized."""
    state = distributed_state()
    if state.client is None:
        raise ValueError(
            "Ranks are in several processes, and these do not know each other. Call "
            "`jax.distributed.initialize` before anything else."
        )
    return state
