"""Steps that passes put in, and what they ask of steps that are there."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax

from ...ir import Atom, Eqn, Graph, Literal, PrimitiveCall, Var, has_print, variables

ADD = PrimitiveCall("add", lambda x, y: [x + y])
COPY = PrimitiveCall("copy", lambda x: [x])


def copy_of(atom: Atom) -> Eqn:
    """A step that makes a value of its own out of any atom."""
    return Eqn(COPY, (atom,), (Var(aval_of(atom)),))


def aval_of(atom: Atom) -> Any:
    return jax.typeof(atom.value) if isinstance(atom, Literal) else atom.aval


def is_sum(step: Eqn) -> bool:
    """Whether it adds two values of one type."""
    operation = step.operation
    if not isinstance(operation, PrimitiveCall) or operation.name not in ("add", "add_any"):
        return False
    avals = {(atom.aval.shape, atom.aval.dtype) for atom in variables(step.inputs)}
    result = step.outputs[0].aval
    return len(variables(step.inputs)) == 2 and avals == {(result.shape, result.dtype)}


def substituted(steps: Iterable[Eqn], known: dict[Var, Atom]) -> list[Eqn]:
    """The steps with other inputs, where there are any in `known`."""
    return [
        replace(step, inputs=tuple(_known(atom, known) for atom in step.inputs)) for step in steps
    ]


def with_outputs(program: Graph, steps: Iterable[Eqn], known: dict[Var, Atom]) -> Graph:
    """The program with other steps, and what is `known` among its outputs."""
    outputs = tuple(_known(atom, known) for atom in program.outputs)
    return Graph(program.inputs, tuple(steps), outputs)


def _known(atom: Atom, known: dict[Var, Atom]) -> Atom:
    return known.get(atom, atom) if isinstance(atom, Var) else atom


def live(program: Graph) -> Graph:
    """The steps that outputs depend on, whole, and those that print."""
    needed, steps = set(variables(program.outputs)), []
    for step in reversed(program.steps):
        if has_print(step) or needed.intersection(step.outputs):
            needed.update(variables(step.inputs))
            steps.append(step)
    return replace(program, steps=tuple(reversed(steps)))
