"""Steps that passes put in, and what they ask of steps that are there."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax

from ...ir import Atom, Constant, Plain, Program, Step, Value, prints, values

ADD = Plain("add", lambda x, y: [x + y])
COPY = Plain("copy", lambda x: [x])


def copy_of(atom: Atom) -> Step:
    """A step that makes a value of its own out of any atom."""
    return Step(COPY, (atom,), (Value(aval_of(atom)),))


def aval_of(atom: Atom) -> Any:
    return jax.typeof(atom.value) if isinstance(atom, Constant) else atom.aval


def is_sum(step: Step) -> bool:
    """Whether it adds two values of one type."""
    operation = step.operation
    if not isinstance(operation, Plain) or operation.name not in ("add", "add_any"):
        return False
    avals = {(atom.aval.shape, atom.aval.dtype) for atom in values(step.inputs)}
    result = step.outputs[0].aval
    return len(values(step.inputs)) == 2 and avals == {(result.shape, result.dtype)}


def substituted(steps: Iterable[Step], known: dict[Value, Atom]) -> list[Step]:
    """The steps with other inputs, where there are any in `known`."""
    return [
        replace(step, inputs=tuple(_known(atom, known) for atom in step.inputs)) for step in steps
    ]


def with_outputs(program: Program, steps: Iterable[Step], known: dict[Value, Atom]) -> Program:
    """The program with other steps, and what is `known` among its outputs."""
    outputs = tuple(_known(atom, known) for atom in program.outputs)
    return Program(program.inputs, tuple(steps), outputs)


def _known(atom: Atom, known: dict[Value, Atom]) -> Atom:
    return known.get(atom, atom) if isinstance(atom, Value) else atom


def live(program: Program) -> Program:
    """The steps that outputs depend on, whole, and those that print."""
    needed, steps = set(values(program.outputs)), []
    for step in reversed(program.steps):
        if prints(step) or needed.intersection(step.outputs):
            needed.update(values(step.inputs))
            steps.append(step)
    return replace(program, steps=tuple(reversed(steps)))
