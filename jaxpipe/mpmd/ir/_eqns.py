"""Makes, rewrites and classifies equations and the other nodes of a graph for the passes."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, TypeGuard, TypeVar

import jax
import jax.numpy as jnp

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
from ._marks import STAGE_END
from ._mpmd_graph import MpmdGraph, PipelinedLoop
from ._reduce import Concat, Max, Reduction, is_add

G = TypeVar("G", Graph, MpmdGraph)
N = TypeVar("N", Eqn, PipelinedLoop, Eqn | PipelinedLoop)

ADD = PrimitiveCall("add", lambda x, y: [x + y])
COPY = PrimitiveCall("copy", lambda x: [x])
_MAX = PrimitiveCall("max", lambda x, y: [jnp.maximum(x, y)])


def chain_eqns(
    parts: Sequence[Atom], result: Var, operations: Iterable[PrimitiveCall] = repeat(ADD)
) -> list[Eqn]:
    """Returns the equations that combine parts, one after the other; none for a single part."""
    eqns, total = [], parts[0]
    for i, (part, operation) in enumerate(zip(parts[1:], operations, strict=False), 2):
        combined = result if i == len(parts) else Var(result.aval)
        eqns.append(Eqn(operation, (total, part), (combined,)))
        total = combined
    return eqns


def combine_eqns(
    parts: Sequence[Var], result: Var, reduction: Reduction, microbatches: Sequence[Collection[int]]
) -> list[Eqn]:
    """Returns the equations that compute a result of a loop from those of its ranks.

    A schedule such as DualPipe runs a stage on two ranks, and a microbatch on one of them. Each
    rank reduces the results of its microbatches, as if there were no others.
    """
    operations = [_combination(reduction, own) for own in microbatches[1:]]
    return chain_eqns(parts, result, operations)


def _combination(reduction: Reduction, own: Collection[int]) -> PrimitiveCall:
    """Returns `(result, result of a rank with the microbatches own) -> result of both`."""
    operation = reduction.operation
    if is_add(operation):
        return ADD
    if operation is Max:
        return _MAX
    if isinstance(operation, Concat):
        mask = tuple(m in own for m in range(reduction.num_microbatches))
        return PrimitiveCall("with_microbatches", partial(_with_microbatches, operation.axis, mask))
    combine = getattr(operation, "combine", None)
    if combine is None:
        raise ValueError(
            f"`operation` has {operation!r}, and `schedule` runs a stage on several ranks, which "
            "reduce different microbatches. Give `operation` a method `combine(state, other)` that "
            "returns the state of both, or give a schedule that has each stage on one rank."
        )
    return PrimitiveCall("combine", lambda state, other: [combine(state, other)])


def _with_microbatches(
    axis: int, mask: tuple[bool, ...], stacked: jax.Array, other: jax.Array
) -> list[jax.Array]:
    """Returns `stacked` with the microbatches of `mask` taken from `other`."""
    axis %= stacked.ndim
    shape = [len(mask) if dim == axis else 1 for dim in range(stacked.ndim)]
    return [jnp.where(jnp.asarray(mask).reshape(shape), other, stacked)]


def copy_eqn(atom: Atom) -> Eqn:
    """Returns an equation that copies an atom to a new variable."""
    return Eqn(COPY, (atom,), (Var(aval_of(atom)),))


def primitive_of(node: Eqn | PipelinedLoop) -> str:
    """Returns the name of the primitive that a node calls, "" if it has bodies."""
    operation = node.operation if isinstance(node, Eqn) else None
    return operation.name if isinstance(operation, PrimitiveCall) else ""


def params_of(eqn: Eqn) -> Mapping[str, Any]:
    """Returns the parameters of an equation that calls a primitive."""
    assert isinstance(eqn.operation, PrimitiveCall)
    return eqn.operation.params


def is_cast(eqn: Eqn) -> bool:
    """Returns whether an equation casts a value to another dtype."""
    return primitive_of(eqn) == "convert_element_type"


def is_sum(eqn: Eqn | PipelinedLoop) -> TypeGuard[Eqn]:
    """Returns whether a node adds two variables of the shape and dtype of its output."""
    if primitive_of(eqn) not in ("add", "add_any"):
        return False
    avals = {(atom.aval.shape, atom.aval.dtype) for atom in variables(eqn.inputs)}
    result = eqn.outputs[0].aval
    return len(variables(eqn.inputs)) == 2 and avals == {(result.shape, result.dtype)}


def is_mark(eqn: Eqn) -> bool:
    """Returns whether an equation marks the end of a stage."""
    return primitive_of(eqn) == STAGE_END


def is_backward_mark(eqn: Eqn) -> bool:
    """Returns whether a mark was made by transposition."""
    return params_of(eqn)["backward"]


def part_of_mark(eqn: Eqn) -> int | None:
    """Returns the part whose arrays a mark marks; None if it ends a stage."""
    return params_of(eqn)["part"]


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
