"""Holds the state that programs of a job share: transport, watchdog, and counters of channels."""

import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import PartitionSpec

from ._leave import wait_at_exit
from ._rendezvous import (
    Transport,
    check_agreement,
    check_same_program,
    kv_get,
    kv_put,
    open_transport,
)
from ._watchdog import Watchdog, start_watchdog

START_SECONDS = 3600.0
"""Time to wait for other processes that compile, or that end their last step, in seconds."""


@dataclass(frozen=True)
class Session:
    """One of several processes of a job.

    Attributes:
        channels: Number of channels from one process to another, over all programs.
        programs: Numbers the programs of the job: all processes compile the same ones in the same
            order.
    """

    transport: Transport
    watchdog: Watchdog
    channels: Counter[tuple[int, int]]
    programs: Iterator[int]


@functools.cache
def open_session(timeout: float) -> Session:
    """Returns the session of this process; without progress for `timeout` seconds a step fails."""
    watchdog = start_watchdog(timeout)
    wait_at_exit(watchdog, START_SECONDS)
    return Session(open_transport(START_SECONDS), watchdog, Counter(), itertools.count())


@dataclass(frozen=True)
class CompileHandshake:
    """Lets processes compare one program that all of them compile, and its shardings."""

    name: str

    def check_program(self, digest: str) -> None:
        """Checks that all processes run the same program."""
        check_same_program(digest, self.name, timeout=START_SECONDS)

    def put_specs(self, index: int, specs: Sequence[PartitionSpec]) -> None:
        """Sends the shardings that this process's compiler chose for an instruction's results."""
        kv_put(f"{self.name}/specs/{index}", json.dumps([list(spec) for spec in specs]))

    def get_specs(self, index: int, process: int) -> list[PartitionSpec]:
        """Returns the shardings that another process's compiler chose for an instruction."""
        what = f"{self.name}/specs/{index}"
        values = kv_get(what, [process], START_SECONDS)
        if process not in values:
            raise TimeoutError(f"Process {process} has not compiled within {START_SECONDS} s.")
        return [
            PartitionSpec(*(tuple(p) if isinstance(p, list) else p for p in spec))
            for spec in json.loads(values[process])
        ]

    def wait_for_all(self, layouts: Mapping[str, str], peers: Iterable[int]) -> None:
        """Waits until every process has compiled, and compares channels with those of `peers`."""
        problem = ""
        try:
            check_agreement(f"{self.name}/channels", layouts, peers, timeout=START_SECONDS)
        except ValueError as error:
            problem = str(error)
        everyone, fact = range(jax.process_count()), {"what travels": problem or "it fits"}
        check_agreement(f"{self.name}/compiled", fact, everyone, timeout=START_SECONDS)
        if problem:  # all say the same
            raise ValueError(problem)
