"""What the programs of one job share: the transport, the watchdog, and numbers for what travels."""

import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import PartitionSpec

from ._remote import Transport, ask, check_agreement, check_same_program, open_transport, tell
from ._watchdog import Watchdog, start_watchdog

START_SECONDS = 3600.0
"""How long to wait for other processes that compile."""


@dataclass(frozen=True)
class Session:
    """One process of a job of several.

    Attributes:
        transport: To the others.
        dog: What makes an error of a step that cannot finish.
        routes: How many routes there are from one process to another, over all programs.
        programs: Numbers the programs of the job: all processes compile the same, in one order.
    """

    transport: Transport
    dog: Watchdog
    routes: Counter[tuple[int, int]]
    programs: Iterator[int]


@functools.cache
def open_session(timeout: float) -> Session:
    """The session of this process.

    Args:
        timeout: How long a step may stand still, in seconds.
    """
    dog = start_watchdog(timeout)
    return Session(open_transport(START_SECONDS), dog, Counter(), itertools.count())


@dataclass(frozen=True)
class Agreement:
    """One program that all processes compile: what they tell each other of it."""

    name: str

    def check_program(self, digest: str) -> None:
        """Checks that all run the same.

        Raises:
            ValueError: On every process, naming those that differ.
        """
        check_same_program(digest, self.name, timeout=START_SECONDS)

    def tell_specs(self, place: int, specs: Sequence[PartitionSpec]) -> None:
        """Says how what an instruction makes is divided, which the compiler here has decided."""
        tell(f"{self.name}/specs/{place}", json.dumps([list(spec) for spec in specs]))

    def ask_specs(self, place: int, process: int) -> list[PartitionSpec]:
        """What the process that compiles an instruction has said of it."""
        what = f"{self.name}/specs/{place}"
        told = ask(what, [process], START_SECONDS)
        if process not in told:
            raise TimeoutError(f"Process {process} has not compiled within {START_SECONDS} s.")
        return [
            PartitionSpec(*(tuple(p) if isinstance(p, list) else p for p in spec))
            for spec in json.loads(told[process])
        ]

    def wait_for_all(self, layouts: Mapping[str, str], peers: Iterable[int]) -> None:
        """Until every process has compiled, so that the first step's clock starts for all.

        Args:
            layouts: What travels on each route of this process, in words.
            peers: The processes at the other ends.

        Raises:
            ValueError: On every process, if two ends of a route differ, naming both.
        """
        problem = ""
        try:
            check_agreement(f"{self.name}/routes", layouts, peers, timeout=START_SECONDS)
        except ValueError as error:
            problem = str(error)
        everyone, fact = range(jax.process_count()), {"what travels": problem or "it fits"}
        check_agreement(f"{self.name}/compiled", fact, everyone, timeout=START_SECONDS)
        if problem:  # all say the same
            raise ValueError(problem)
