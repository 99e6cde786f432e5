"""Divides a program in two: the equations that some outputs need, and the remaining ones.

The second half is given the inputs again, and links: values that the first half has computed.
An equation that costs much is never computed twice. An equation that costs little, such as a cast
or a product of arrays, is computed again if this reduces the bytes of the links.

Scans, conds and shard_maps are divided too, each into two of its kind. Any other equation stays
whole, in the first half if that needs one of its outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ._cost import is_cheap, is_light, is_move
from ._graph import Eqn, Graph, Var, free_variables, select, variables
from ._minimal_cut import minimal_cut
from ._partition_nested import Halves, Kind, split_step


@dataclass(frozen=True)
class Partition:
    """Two programs that together compute one.

    Attributes:
        first: `(inputs) -> (the outputs that were asked for, links)`.
        second: `(some of the inputs, links) -> the other outputs`.
        reads: [num_inputs] whether `second` reads each input.
    """

    first: Graph
    second: Graph
    reads: tuple[bool, ...]


def partition(program: Graph, first: Sequence[bool], kinds: Sequence[Kind]) -> Partition:
    """Divides a program into two halves.

    Args:
        program: The program to divide.
        first: [num_outputs] whether the first half computes each output. It computes nothing else
            but links.
        kinds: [num_inputs] how each input is available to the second half. An input that is "kept"
            until the second half runs weighs as much as a link.

    Returns:
        The two halves.
    """
    halves = divide(program, first, kinds)
    others = select(program.outputs, [not is_first for is_first in first])
    used = set(free_variables(halves.second, others)) - set(halves.links)
    reads = tuple(value in used for value in program.inputs)
    again = [value for value in program.inputs if value in used]
    return Partition(
        Graph(
            program.inputs, tuple(halves.first), (*select(program.outputs, first), *halves.links)
        ),
        Graph((*again, *halves.links), tuple(halves.second), others),
        reads,
    )


def divide(program: Graph, wanted: Sequence[bool], kinds: Sequence[Kind]) -> Halves:
    """Divides a program into the equations that the wanted outputs need, and the others.

    Args:
        program: The program to divide.
        wanted: [num_outputs] whether the first half computes each output.
        kinds: [num_inputs] how each input is available to the second half.

    Returns:
        The equations of both halves, and the values that link them.
    """
    by_kind = {kind: set(select(program.inputs, [k == kind for k in kinds])) for kind in _KINDS}
    free = _free(program, by_kind["free"])
    first, second = _assign(program, wanted, free)
    early, late = _early(second, by_kind["own"])
    others = select(program.outputs, [not want for want in wanted])
    own = by_kind["own"].union(*(step.outputs for step in late))
    needs = [value for value in free_variables(late, others) if value not in own]

    cheap = [step for step in first if is_cheap(step)]
    chosen = _cut(cheap, early, needs, free, by_kind["kept"])
    moved = _leading_to(chosen, early)
    again = _leading_to(needs, [*cheap, *early], given=chosen)
    links = [value for value in chosen if value not in by_kind["kept"]]
    return Halves([*first, *moved], [*again, *late], links)


_KINDS = ("free", "kept", "gone", "own")


def _free(program: Graph, given: set[Var]) -> set[Var]:
    """Returns the values that the second half has, or can compute from those at little cost."""
    free = set(given)
    for step in program.steps:
        if is_cheap(step) and free.issuperset(variables(step.inputs)):
            free.update(step.outputs)
    return free


def _assign(program: Graph, wanted: Sequence[bool], free: set[Var]) -> tuple[list[Eqn], list[Eqn]]:
    """Returns the equations that the wanted outputs need, and the others."""
    needed = set(variables(select(program.outputs, wanted)))
    first: list[Eqn] = []
    second: list[Eqn] = []
    for step in reversed(program.steps):
        outputs = [value in needed for value in step.outputs]
        if not any(outputs):
            second.append(step)
            continue
        ours, theirs = ([step], []) if all(outputs) else split_step(step, outputs, free, divide)
        first += ours
        second += [step for step in theirs if step.outputs]
        needed.update(value for step in ours for value in variables(step.inputs))
    return first[::-1], second[::-1]


def _early(second: Sequence[Eqn], own: set[Var]) -> tuple[list[Eqn], list[Eqn]]:
    """Splits the second half by whether an equation must run late.

    It must if it costs much, if it depends on an equation that costs much, or if it reads an input
    that only the second half has (`own`).

    Returns:
        The equations that may run in the first half, and all others.
    """
    late_values = set(own)
    early: list[Eqn] = []
    late: list[Eqn] = []
    for step in second:
        if is_light(step) and late_values.isdisjoint(variables(step.inputs)):
            early.append(step)
        else:
            late.append(step)
            late_values.update(step.outputs)
    return early, late


def _cut(
    first: Sequence[Eqn],
    early: Sequence[Eqn],
    needs: Sequence[Var],
    free: set[Var],
    kept: set[Var],
) -> list[Var]:
    """Returns the values with the fewest bytes that the second half must have.

    From these values, cheap equations of the first half and early equations of the second compute
    all values that the late equations need.
    """
    parents = {
        v: tuple(dict.fromkeys(variables(s.inputs))) for s in (*first, *early) for v in s.outputs
    }
    parents |= dict.fromkeys(free, ())
    moved = {v for step in (*filter(is_move, first), *early) for v in step.outputs}

    def cost(value: Var) -> int:
        # Of two values with equal bytes, prefers an input, which is kept already, and then the
        # one that is computed first.
        return 3 * value.num_bytes + (value not in kept) + (value in moved) or 1

    return minimal_cut(needs, parents, cost)


def _leading_to(
    ends: Sequence[Var], steps: Sequence[Eqn], *, given: Sequence[Var] = ()
) -> list[Eqn]:
    """Returns the equations that compute `ends` from `given`."""
    missing = set(ends).difference(given)
    leading: list[Eqn] = []
    for step in reversed(steps):
        if missing.intersection(step.outputs):
            leading.append(step)
            missing.update(set(variables(step.inputs)).difference(given))
    return leading[::-1]
