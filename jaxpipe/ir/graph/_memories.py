"""A graph in the device's memory alone."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax

from ._graph import Atom, Cond, Eqn, Graph, Literal, PrimitiveCall, Scan, ShardMap, Var


def in_device_memory(graph: Graph) -> Graph:
    """Removes the moves between the device's and the host's memory from a graph."""
    graph_inputs = tuple(map(_of_device, graph.inputs))
    renamed: dict[Var, Atom] = dict(zip(graph.inputs, graph_inputs, strict=True))

    def look_up(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else renamed[atom]

    eqns = []
    for eqn in graph.eqns:
        inputs = tuple(map(look_up, eqn.inputs))
        outputs = inputs
        if not _changes_memory(eqn):
            outputs = tuple(map(_of_device, eqn.outputs))
            eqns.append(Eqn(_operation(eqn.operation), inputs, outputs))
        renamed.update(zip(eqn.outputs, outputs, strict=True))
    return Graph(graph_inputs, tuple(eqns), tuple(map(look_up, graph.outputs)))


def _operation(operation: Any) -> Any:
    match operation:
        case Scan(body=body) | ShardMap(body=body):
            return replace(operation, body=in_device_memory(body))
        case Cond(branches=branches):
            return replace(operation, branches=tuple(map(in_device_memory, branches)))
        case PrimitiveCall("empty2", params=params, equation=equation) if equation and (
            params["memory_space"] is jax.memory.Space.Host
        ):
            # Branches that make no residual return zeros, which jax 0.10 to 0.12 makes by "empty2"
            # in the memory that its parameter names.
            on_device = {**params, "memory_space": jax.memory.Space.Device}
            bind = partial(equation.primitive.bind, **on_device)
            return PrimitiveCall("empty2", lambda: [bind()], on_device)
        case _:
            return operation


def _of_device(var: Var) -> Var:
    return Var(var.aval.update(memory_space=jax.memory.Space.Device))


def _changes_memory(eqn: Eqn) -> bool:
    """Returns whether an equation moves its inputs from one memory to another."""
    is_put = isinstance(eqn.operation, PrimitiveCall) and eqn.operation.name == "device_put"
    return is_put and any(
        isinstance(x, Var) and x.aval.memory_space != y.aval.memory_space
        for x, y in zip(eqn.inputs, eqn.outputs, strict=True)
    )
