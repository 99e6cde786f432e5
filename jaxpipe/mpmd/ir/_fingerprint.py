"""Compares programs by the computation they perform: equal fingerprints mean equal programs.

Names of variables and the origin of a program do not count. Objects that cannot be compared by
value are equal only if they are the same object. The fingerprints of two equal programs may
therefore differ, but the fingerprints of two different programs are never equal.
"""

from collections.abc import Hashable, Iterable
from functools import partial
from typing import Any

import numpy as np
from jax.extend import core

from ...ir.graph import Atom, Cond, Eqn, Graph, Literal, PrimitiveCall, Scan, ShardMap, Var


def fingerprint(graph: Graph) -> Hashable:
    """Returns the fingerprint of a program."""
    value_ids: dict[Var, Hashable] = {value: i for i, value in enumerate(graph.inputs)}
    eqns = []
    for eqn in graph.eqns:
        inputs = tuple(_fingerprint_atom(atom, value_ids) for atom in eqn.inputs)
        eqns.append((_fingerprint_operation(eqn.operation), inputs))
        for value in eqn.outputs:
            value_ids[value] = len(value_ids)
    outputs = tuple(_fingerprint_atom(atom, value_ids) for atom in graph.outputs)
    return tuple(value.aval for value in graph.inputs), tuple(eqns), outputs


class ValueNumbering:
    """Value numbering: two values with equal ids are certainly equal.

    The output of an `optimization_barrier` has the id of its input. A value that is rematerialized
    behind a barrier thus has the id of the original.
    """

    def __init__(self, inputs: Iterable[Var]) -> None:
        self._value_ids: dict[Var, Hashable] = {}
        self._known: dict[Hashable, int] = {}
        for value in inputs:
            self._value_ids[value] = self._intern(("input", len(self._known)))

    def _intern(self, key: Hashable) -> int:
        return self._known.setdefault(key, len(self._known))

    def add(self, eqn: Eqn) -> tuple[Hashable, ...]:
        """Assigns ids to the outputs of an equation, and returns these ids."""
        inputs = tuple(_fingerprint_atom(atom, self._value_ids) for atom in eqn.inputs)
        if is_barrier(eqn):
            output_ids = inputs
        else:
            eqn_id = self._intern((_fingerprint_operation(eqn.operation), inputs))
            output_ids = tuple((eqn_id, i) for i in range(len(eqn.outputs)))
        self._value_ids.update(zip(eqn.outputs, output_ids, strict=True))
        return output_ids


def is_barrier(eqn: Eqn) -> bool:
    """Returns whether an equation is an `optimization_barrier`."""
    operation = eqn.operation
    return isinstance(operation, PrimitiveCall) and operation.name == "optimization_barrier"


def _fingerprint_atom(atom: Atom, value_ids: dict[Var, Hashable]) -> Hashable:
    return _fingerprint_constant(atom.value) if isinstance(atom, Literal) else value_ids[atom]


_MAX_COMPARED_BYTES = 1024


def _fingerprint_constant(value: Any) -> Hashable:
    if isinstance(value, np.ndarray | np.generic | int | float | bool):
        array = np.asarray(value)
        if array.nbytes <= _MAX_COMPARED_BYTES:
            return "constant", array.dtype, array.shape, array.tobytes()
    return _fingerprint_object(value)


def _fingerprint_operation(operation: Any) -> Hashable:
    match operation:
        case Scan():
            counts = operation.num_consts, operation.num_carry, operation.num_accumulators
            turns = operation.length, operation.reverse, operation.unroll
            return "scan", fingerprint(operation.body), counts, turns
        case Cond():
            return "cond", tuple(map(fingerprint, operation.branches))
        case ShardMap():
            mesh = _fingerprint_object(operation.mesh), operation.axes, operation.check_vma
            specs = operation.in_specs, operation.out_specs
            return "shard_map", fingerprint(operation.body), mesh, specs
        case PrimitiveCall(name, run, params, equation):
            if equation is None:
                return name, _fingerprint_function(run)
            literals = tuple(
                (i, x.aval, _fingerprint_constant(x.val))
                for i, x in enumerate(equation.invars)
                if isinstance(x, core.Literal)
            )
            named = tuple((key, _fingerprint_object(params[key])) for key in sorted(params))
            return name, named, literals
    raise AssertionError(operation)


def _fingerprint_function(run: Any) -> Hashable:
    if isinstance(run, partial):
        named = tuple((key, _fingerprint_object(run.keywords[key])) for key in sorted(run.keywords))
        return _fingerprint_function(run.func), tuple(map(_fingerprint_object, run.args)), named
    if getattr(run, "__closure__", True) is None and hasattr(run, "__code__"):
        return run.__module__, run.__code__
    return _fingerprint_object(run)


def _fingerprint_object(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return "object", id(value)
    return value
