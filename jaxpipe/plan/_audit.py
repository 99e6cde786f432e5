"""What a compiled step communicates: every collective, with the trip counts of its loops applied.

XLA's own cost analysis counts the body of a loop once.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from ._collectives import KINDS, Collective, collective
from ._hlo import Instruction, called, callee, op_name, parse
from ._trips import (
    Scope,
    enter,
    enter_branch,
    enter_loop,
    trip_count,
    unknown_argument,
)


@dataclass(frozen=True)
class Site:
    """One collective of the program text.

    Attributes:
        kind: One of `KINDS`.
        name: Its instruction.
        shape: Of its result.
        result_bytes: Of one execution, on one device.
        executions: How often a step runs it; at least once where a trip count is unknown.
        asynchronous: Whether other instructions may run between its start and its end.
        loops: Names of the loops around it, outermost first.
        conditional: Whether it is in a branch; then `executions` counts as if always taken, unless
            the conditional is in a name scope `taken_3_of_10`.
        across_slices: Whether it crosses the network between slices.
        groups: The devices that talk, as XLA writes them.
        op_name: Where it comes from in the Python program.
    """

    kind: str
    name: str
    shape: str
    result_bytes: int
    executions: int
    asynchronous: bool
    loops: tuple[str, ...]
    conditional: bool
    across_slices: bool
    groups: str
    op_name: str


@dataclass(frozen=True)
class Loop:
    """One while loop: how often its body runs, or None, and the loops around it."""

    name: str
    trips: int | None
    loops: tuple[str, ...]
    op_name: str


@dataclass(frozen=True)
class Audit:
    """Everything a step communicates, and its loops, in program order."""

    sites: tuple[Site, ...]
    loops: tuple[Loop, ...]


@dataclass(frozen=True)
class Total:
    """The sum over sites, per step and device. Bytes are those of results."""

    sites: int
    executions: int
    result_bytes: int
    asynchronous_bytes: int
    in_loops_bytes: int
    across_slices_bytes: int


def audit(hlo_text: str) -> Audit:
    """Finds every collective of an optimized program and counts how often a step runs it.

    A loop multiplies by its trip count. Of the branches of a conditional, the one that moves most
    bytes counts: every time, or as often as a name scope says that it is taken. An asynchronous
    collective is one, however many instructions XLA made of it.

    Args:
        hlo_text: `compiled.as_text()`.

    Raises:
        ValueError: If the text is not that of a compiled program.
    """
    module = parse(hlo_text)
    scope = Scope(module, module.entry, unknown_argument)
    found = tuple(_walk(scope, _Place(1, Fraction(1), (), False, False, False, "")))
    sites = tuple(item for item in found if isinstance(item, Site))
    return Audit(sites, tuple(item for item in found if isinstance(item, Loop)))


def total(sites: tuple[Site, ...]) -> Total:
    """Sums up sites."""

    def moved(chosen: list[Site]) -> int:
        return sum(site.executions * site.result_bytes for site in chosen)

    return Total(
        len(sites),
        sum(site.executions for site in sites),
        moved(list(sites)),
        moved([site for site in sites if site.asynchronous]),
        moved([site for site in sites if site.loops]),
        moved([site for site in sites if site.across_slices]),
    )


def totals(audit: Audit) -> dict[str, Total]:
    """A total for each kind that occurs, in the order of `KINDS`."""
    present = [kind for kind in KINDS if any(site.kind == kind for site in audit.sites)]
    return {kind: total(tuple(s for s in audit.sites if s.kind == kind)) for kind in present}


def uncounted_loops(audit: Audit) -> tuple[str, ...]:
    """Loops with collectives inside whose trip count is unknown: these are counted once."""
    unknown = {loop.name for loop in audit.loops if loop.trips is None}
    around = {name for site in audit.sites for name in site.loops}
    return tuple(sorted(unknown & around))


@dataclass(frozen=True)
class _Place:
    """Where a computation stands in the step.

    `executions` are those if every branch were taken, and `taken` of them are.
    """

    executions: int
    taken: Fraction
    loops: tuple[str, ...]
    conditional: bool
    asynchronous: bool
    fused: bool
    op_name: str


_Found = Iterator[Site | Loop]


def _walk(scope: Scope, place: _Place) -> _Found:
    for instruction in scope.computation.instructions.values():
        found = collective(scope.computation, instruction, fused=place.fused)
        if found is not None:
            yield _site(found, place)
        elif instruction.opcode == "while":
            yield from _loop(scope, instruction, place)
        elif instruction.opcode == "conditional":
            yield from _largest_branch(scope, instruction, place)
        elif instruction.opcode in _CALLS:
            inside = enter(scope, instruction, callee(instruction))
            yield from _walk(inside, _called_place(place, instruction))


_CALLS = ("call", "fusion", "call-start", "async-start")


def _called_place(place: _Place, call: Instruction) -> _Place:
    return replace(
        place,
        asynchronous=place.asynchronous or call.opcode.endswith("-start"),
        fused=call.opcode == "fusion",
        op_name=op_name(call) or place.op_name,
    )


def _site(found: Collective, place: _Place) -> Site:
    return Site(
        found.kind,
        found.name,
        found.shape,
        found.result_bytes,
        math.ceil(place.executions * place.taken),
        found.asynchronous or place.asynchronous,
        place.loops,
        place.conditional,
        found.across_slices,
        found.groups,
        found.op_name or place.op_name,
    )


def _loop(scope: Scope, loop: Instruction, place: _Place) -> _Found:
    trips = trip_count(scope, loop)
    yield Loop(loop.name, trips, place.loops, op_name(loop))
    times = 1 if trips is None else trips
    loops = (*place.loops, loop.name)
    # A condition is asked once more than its body runs. It seldom communicates.
    for part, executions in (("condition", times + 1), ("body", times)):
        inside = enter_loop(scope, loop, called(loop, part)[0])
        executions *= place.executions
        yield from _walk(inside, replace(place, executions=executions, loops=loops))


def _largest_branch(scope: Scope, conditional: Instruction, place: _Place) -> _Found:
    two = ("true_computation", "false_computation")
    names = called(conditional, "branch_computations")
    names = names or [called(conditional, key)[0] for key in two]
    branches = []
    for index, name in enumerate(names):
        inside = enter_branch(scope, conditional, index, name)
        taken = min(place.taken, _taken(conditional))
        of_branch = replace(place, conditional=True, taken=taken)
        branches.append(tuple(_walk(inside, of_branch)))
    yield from max(branches, key=_size)


def _taken(conditional: Instruction) -> Fraction:
    """The share that its name scope says; the innermost, if there are several."""
    shares = re.findall(r"taken_(\d+)_of_(\d+)/", op_name(conditional))
    return Fraction(int(shares[-1][0]), int(shares[-1][1])) if shares else Fraction(1)


def _size(found: tuple[Site | Loop, ...]) -> tuple[int, int]:
    whole = total(tuple(item for item in found if isinstance(item, Site)))
    return whole.result_bytes, whole.executions
