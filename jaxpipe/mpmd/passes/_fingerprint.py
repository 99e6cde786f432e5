"""What a program computes, as something to compare: equal programs have equal content.

Names do not count, nor does who made the program. Where two things cannot be compared, they are
equal only if they are the same object: programs may then count as different that are not, never
the other way round.
"""

from collections.abc import Hashable, Iterable
from functools import partial
from typing import Any

import numpy as np
from jax.extend import core

from ...ir import Atom, Cond, Eqn, Graph, Literal, PrimitiveCall, Scan, ShardMap, Var


def content(program: Graph) -> Hashable:
    """Equal for programs that compute the same from inputs of the same types."""
    numbers: dict[Var, Hashable] = {value: i for i, value in enumerate(program.inputs)}
    steps = []
    for step in program.steps:
        inputs = tuple(_of_atom(atom, numbers) for atom in step.inputs)
        steps.append((_of_operation(step.operation), inputs))
        for value in step.outputs:
            numbers[value] = len(numbers)
    outputs = tuple(_of_atom(atom, numbers) for atom in program.outputs)
    return tuple(value.aval for value in program.inputs), tuple(steps), outputs


class Numbers:
    """Numbers for values: equal ones for values that are certainly equal.

    What stands behind a barrier against common subexpressions counts as what is before it: so the
    second computation of something that is rematerialised has the number of the first.
    """

    def __init__(self, inputs: Iterable[Var]) -> None:
        self._number: dict[Var, Hashable] = {}
        self._known: dict[Hashable, int] = {}
        for value in inputs:
            self._number[value] = self._intern(("input", len(self._known)))

    def _intern(self, key: Hashable) -> int:
        return self._known.setdefault(key, len(self._known))

    def of_step(self, step: Eqn) -> tuple[Hashable, ...]:
        """Numbers its outputs, and returns these numbers."""
        inputs = tuple(_of_atom(atom, self._number) for atom in step.inputs)
        if is_barrier(step):
            new = inputs
        else:
            made = self._intern((_of_operation(step.operation), inputs))
            new = tuple((made, i) for i in range(len(step.outputs)))
        self._number.update(zip(step.outputs, new, strict=True))
        return new


def is_barrier(step: Eqn) -> bool:
    operation = step.operation
    return isinstance(operation, PrimitiveCall) and operation.name == "optimization_barrier"


def _of_atom(atom: Atom, numbers: dict[Var, Hashable]) -> Hashable:
    return _of_constant(atom.value) if isinstance(atom, Literal) else numbers[atom]


_FEW_BYTES = 1024


def _of_constant(value: Any) -> Hashable:
    if isinstance(value, np.ndarray | np.generic | int | float | bool):
        array = np.asarray(value)
        if array.nbytes <= _FEW_BYTES:
            return "constant", array.dtype, array.shape, array.tobytes()
    return _of_object(value)


def _of_operation(operation: Any) -> Hashable:
    match operation:
        case Scan():
            sizes = operation.num_consts, operation.num_carry, operation.length, operation.num_sums
            turns = operation.reverse, operation.unroll
            return "loop", content(operation.body), sizes, turns
        case Cond():
            return "choice", tuple(map(content, operation.branches))
        case ShardMap():
            where = _of_object(operation.mesh), operation.axes, operation.check_vma
            specs = operation.in_specs, operation.out_specs
            return "shards", content(operation.body), where, specs
        case PrimitiveCall(name, run, params, equation):
            if equation is None:
                return name, _of_function(run)
            literals = tuple(
                (i, x.aval, _of_constant(x.val))
                for i, x in enumerate(equation.invars)
                if isinstance(x, core.Literal)
            )
            named = tuple((key, _of_object(params[key])) for key in sorted(params))
            return name, named, literals
    raise AssertionError(operation)


def _of_function(run: Any) -> Hashable:
    if isinstance(run, partial):
        named = tuple((key, _of_object(run.keywords[key])) for key in sorted(run.keywords))
        return _of_function(run.func), tuple(map(_of_object, run.args)), named
    if getattr(run, "__closure__", True) is None and hasattr(run, "__code__"):
        return run.__module__, run.__code__
    return _of_object(run)


def _of_object(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return "object", id(value)
    return value
