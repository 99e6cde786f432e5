"""Finds the equations that compute values, and how often values are read."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ._graph import Atom, Eqn, Graph, Var, variables


def count_uses(graph: Graph) -> Counter[Var]:
    """Counts the uses of each variable as an input of an equation or an output of the program."""
    inputs = (atom for eqn in graph.eqns for atom in eqn.inputs)
    return Counter(variables([*inputs, *graph.outputs]))


def origin(
    output: Atom,
    makers: Mapping[Var, Eqn],
    uses: Mapping[Var, int],
    is_passed: Callable[[Eqn], bool],
) -> tuple[Eqn | None, Any, tuple[Eqn, ...]]:
    """Returns the equation behind those passed that computes a value, its output, and those passed.

    The first is None if the value is an input of the program or is read elsewhere too.
    """
    way: list[Eqn] = []
    while isinstance(output, Var) and output in makers and uses[output] == 1:
        eqn = makers[output]
        if not is_passed(eqn):
            return eqn, output, tuple(reversed(way))
        way.append(eqn)
        (output,) = eqn.inputs
    return None, output, tuple(reversed(way))


def free_variables(eqns: Iterable[Eqn], outputs: Iterable[Atom]) -> list[Var]:
    """Returns the variables that `eqns` and `outputs` read and no equation computes, in order."""
    computed = {value for eqn in eqns for value in eqn.outputs}
    atoms = [*(atom for eqn in eqns for atom in eqn.inputs), *outputs]
    return [value for value in dict.fromkeys(variables(atoms)) if value not in computed]
