"""Makes, rewrites and classifies equations for the passes."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax

from ...ir._graph import Atom, Eqn, Graph, Literal, PrimitiveCall, Var, has_print, variables

ADD = PrimitiveCall("add", lambda x, y: [x + y])
COPY = PrimitiveCall("copy", lambda x: [x])


def copy_of(atom: Atom) -> Eqn:
    """Returns an equation that copies an atom to a new variable."""
    return Eqn(COPY, (atom,), (Var(aval_of(atom)),))


def aval_of(atom: Atom) -> Any:
    return jax.typeof(atom.value) if isinstance(atom, Literal) else atom.aval


def is_sum(step: Eqn) -> bool:
    """Returns whether the equation adds two variables of the shape and dtype of its output."""
    operation = step.operation
    if not isinstance(operation, PrimitiveCall) or operation.name not in ("add", "add_any"):
        return False
    avals = {(atom.aval.shape, atom.aval.dtype) for atom in variables(step.inputs)}
    result = step.outputs[0].aval
    return len(variables(step.inputs)) == 2 and avals == {(result.shape, result.dtype)}


def substituted(steps: Iterable[Eqn], known: dict[Var, Atom]) -> list[Eqn]:
    """Returns the equations with each input that is a key of `known` replaced by its value."""
    return [
        replace(step, inputs=tuple(_known(atom, known) for atom in step.inputs)) for step in steps
    ]


def with_outputs(program: Graph, steps: Iterable[Eqn], known: dict[Var, Atom]) -> Graph:
    """Returns the program with other equations, and with its outputs replaced as in `known`."""
    outputs = tuple(_known(atom, known) for atom in program.outputs)
    return Graph(program.inputs, tuple(steps), outputs)


def _known(atom: Atom, known: dict[Var, Atom]) -> Atom:
    return known.get(atom, atom) if isinstance(atom, Var) else atom


def live(program: Graph) -> Graph:
    """Returns the program with only the equations that print or that an output depends on."""
    needed, steps = set(variables(program.outputs)), []
    for step in reversed(program.steps):
        if has_print(step) or needed.intersection(step.outputs):
            needed.update(variables(step.inputs))
            steps.append(step)
    return replace(program, steps=tuple(reversed(steps)))
