"""A program divided in two: what some outputs need, and the rest, which comes later.

The second half is given the inputs again, and links: values that the first has computed. Nothing
that costs much is computed twice. What costs little is, where that makes fewer bytes of links: a
cast or a product of arrays is as fast as reading its result.

Loops, choices and maps over shards are divided too, each into two of its kind. All else stays
whole, in the first half if that needs any of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ._cost import is_cheap, is_light, is_move
from ._graph import Eqn, Graph, Var, free_variables, select, variables
from ._minimal_cut import minimal_cut
from ._partition_nested import Halves, Kind, split_step


@dataclass(frozen=True)
class Partition:
    """Two programs that together are one.

    Attributes:
        first: `(inputs) -> (the outputs that were asked for, links)`.
        second: `(some of the inputs, links) -> the other outputs`.
        reads: Which inputs those are.
    """

    first: Graph
    second: Graph
    reads: tuple[bool, ...]


def partition(program: Graph, first: Sequence[bool], kinds: Sequence[Kind]) -> Partition:
    """Divides a program.

    Args:
        program: What to divide.
        first: Which outputs the first half computes, with what they need and nothing else.
        kinds: What each input is to the second half. Those that are "kept" until then weigh as
            much as a link.
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
    """The steps that the wanted outputs need, the others, and how these are linked."""
    of_kind = {kind: set(select(program.inputs, [k == kind for k in kinds])) for kind in _KINDS}
    free = _free(program, of_kind["free"])
    first, second = _assign(program, wanted, free)
    early, late = _early(second, of_kind["own"])
    others = select(program.outputs, [not want for want in wanted])
    own = of_kind["own"].union(*(step.outputs for step in late))
    needs = [value for value in free_variables(late, others) if value not in own]

    cheap = [step for step in first if is_cheap(step)]
    chosen = _cut(cheap, early, needs, free, of_kind["kept"])
    moved = _leading_to(chosen, early)
    again = _leading_to(needs, [*cheap, *early], given=chosen)
    links = [value for value in chosen if value not in of_kind["kept"]]
    return Halves([*first, *moved], [*again, *late], links)


_KINDS = ("free", "kept", "gone", "own")


def _free(program: Graph, given: set[Var]) -> set[Var]:
    """What the second half has, or can compute from it at little cost."""
    free = set(given)
    for step in program.steps:
        if is_cheap(step) and free.issuperset(variables(step.inputs)):
            free.update(step.outputs)
    return free


def _assign(program: Graph, wanted: Sequence[bool], free: set[Var]) -> tuple[list[Eqn], list[Eqn]]:
    """The steps that the wanted outputs need, and the others."""
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
    """The steps of the second half that might as well run in the first, and those that must not:
    what costs much, and what depends on it or on what is the second half's `own`."""
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
    """The values that the second half is to have, so that cheap steps of the first half and its own
    early ones lead from them to its needs: those with the fewest bytes."""
    parents = {
        v: tuple(dict.fromkeys(variables(s.inputs))) for s in (*first, *early) for v in s.outputs
    }
    parents |= dict.fromkeys(free, ())
    moved = {v for step in (*filter(is_move, first), *early) for v in step.outputs}

    def cost(value: Var) -> int:
        # Of two with as many bytes an input, which is there already, or else what is there first.
        return 3 * value.num_bytes + (value not in kept) + (value in moved) or 1

    return minimal_cut(needs, parents, cost)


def _leading_to(
    ends: Sequence[Var], steps: Sequence[Eqn], *, given: Sequence[Var] = ()
) -> list[Eqn]:
    """Those of the steps that lead from what is given to `ends`."""
    missing = set(ends).difference(given)
    leading: list[Eqn] = []
    for step in reversed(steps):
        if missing.intersection(step.outputs):
            leading.append(step)
            missing.update(set(variables(step.inputs)).difference(given))
    return leading[::-1]
