"""Makes, rewrites and classifies equations and the other nodes of a graph for the passes."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeGuard, TypeVar

from ...ir.graph import (
    Atom,
    Cond,
    Eqn,
    Graph,
    PrimitiveCall,
    Scan,
    ShardMap,
    Var,
    aval_of,
    has_print,
    variables,
)
from ._loop import PipelinedLoop
from ._marks import STAGE_END
from ._mpmd_graph import MpmdGraph

G = TypeVar("G", Graph, MpmdGraph)
N = TypeVar("N", Eqn, PipelinedLoop, Eqn | PipelinedLoop)

ADD = PrimitiveCall("add", lambda x, y: [x + y])
COPY = PrimitiveCall("copy", lambda x: [x])


def copy_eqn(atom: Atom) -> Eqn:
    """Returns an equation that copies an atom to a new variable."""
    return Eqn(COPY, (atom,), (Var(aval_of(atom)),))


def is_cast(eqn: Eqn) -> bool:
    """Returns whether an equation casts a value to another dtype."""
    operation = eqn.operation
    return isinstance(operation, PrimitiveCall) and operation.name == "convert_element_type"


def is_sum(eqn: Eqn | PipelinedLoop) -> TypeGuard[Eqn]:
    """Returns whether a node adds two variables of the shape and dtype of its output."""
    operation = eqn.operation if isinstance(eqn, Eqn) else None
    if not isinstance(operation, PrimitiveCall) or operation.name not in ("add", "add_any"):
        return False
    avals = {(atom.aval.shape, atom.aval.dtype) for atom in variables(eqn.inputs)}
    result = eqn.outputs[0].aval
    return len(variables(eqn.inputs)) == 2 and avals == {(result.shape, result.dtype)}


def is_mark(eqn: Eqn) -> bool:
    """Returns whether an equation marks the end of a stage."""
    return isinstance(eqn.operation, PrimitiveCall) and eqn.operation.name == STAGE_END


def is_backward_mark(eqn: Eqn) -> bool:
    """Returns whether a mark was made by transposition."""
    assert isinstance(eqn.operation, PrimitiveCall)
    return eqn.operation.params["backward"]


def part_of_mark(eqn: Eqn) -> int | None:
    """Returns the part whose arrays a mark marks; None if it ends a stage."""
    assert isinstance(eqn.operation, PrimitiveCall)
    return eqn.operation.params["part"]


def is_transposed(eqn: Eqn) -> bool:
    """Returns whether JAX made the equation by transposition, according to its name stack."""
    match eqn.operation:
        case PrimitiveCall(equation=equation):
            return equation is not None and "transpose(" in str(equation.source_info.name_stack)
        case Scan(body=body) | ShardMap(body=body):
            return any(map(is_transposed, body.eqns))
        case Cond(branches=branches):
            return any(is_transposed(inner) for branch in branches for inner in branch.eqns)


def prints(node: Eqn | PipelinedLoop) -> bool:
    """Returns whether a node is an equation outside of loops that prints or calls back."""
    return isinstance(node, Eqn) and has_print(node)


def substitute_inputs(eqns: Iterable[N], replacements: Mapping[Var, Atom]) -> list[N]:
    """Returns the nodes with each input that is a key of `replacements` replaced by its value."""
    return [
        replace(eqn, inputs=tuple(_substitute(atom, replacements) for atom in eqn.inputs))
        for eqn in eqns
    ]


def with_outputs(graph: G, eqns: Iterable[Any], replacements: Mapping[Var, Atom]) -> G:
    """Returns the graph with other nodes, and with its outputs replaced as in `replacements`."""
    outputs = tuple(_substitute(atom, replacements) for atom in graph.outputs)
    return replace(graph, eqns=tuple(eqns), outputs=outputs)


def _substitute(atom: Atom, replacements: Mapping[Var, Atom]) -> Atom:
    return replacements.get(atom, atom) if isinstance(atom, Var) else atom


def eliminate_dead_code(graph: G) -> G:
    """Returns the graph with only the nodes that print or that an output depends on."""
    needed, eqns = set(variables(graph.outputs)), []
    for eqn in reversed(graph.eqns):
        if prints(eqn) or needed.intersection(eqn.outputs):
            needed.update(variables(eqn.inputs))
            eqns.append(eqn)
    return replace(graph, eqns=tuple(reversed(eqns)))
