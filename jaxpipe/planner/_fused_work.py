"""What a function reads and writes beside its products, as compilers fuse its operations."""

import math
from collections import defaultdict
from typing import Any

from .._compat import jaxprs_in_params
from ..ir.graph import (
    Cond,
    Eqn,
    Graph,
    PrimitiveCall,
    Scan,
    ShardMap,
    Var,
    is_invertible_move,
    is_light,
    repeated_equations,
    terms_of_product,
    to_graph,
    variables,
)
from ..kernels import ATTENTION

_PARTS = ("gather", "slice", "dynamic_slice", "split")
"""Light operations that read a part of an array."""
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "ppermute", "psum", "psum_invariant")
_BODIES = {"while": "body_jaxpr", "custom_vmap_call": "call"}


def fused_work(graph: Graph) -> tuple[float, int]:
    """Returns the bytes that are read and written, and how many operations there are.

    What only element-wise operations make and read is not stored, nor what a reduction reads: it is
    computed from the stored arrays behind it. Products and attention count as operations alone:
    their bytes are in their own time, as those of collectives are.
    """
    readers: dict[Var, list[Eqn]] = defaultdict(list)
    for eqn in graph.eqns:
        for x in variables(eqn.inputs):
            readers[x].append(eqn)
    returned = set(variables(graph.outputs))
    behind: dict[Var, frozenset[Var]] = {}  # of what is not stored: the stored arrays it is from
    moved, kernels = 0.0, 0
    for eqn in graph.eqns:
        inputs = variables(eqn.inputs)
        read = frozenset[Var]().union(*(behind.get(x, {x}) for x in inputs))
        if _is_the_same_array(eqn) and inputs[0] not in behind:
            behind[eqn.outputs[0]] = read
            continue
        if not is_light(eqn):
            more, count = _alone(eqn)
            moved, kernels = moved + more, kernels + count
            continue
        if _name(eqn) in _PARTS:
            read = frozenset()
            moved += sum(x.num_bytes for x in eqn.outputs)
        is_stored = reduces(eqn) or any(
            x in returned or not all(map(is_light, readers[x])) for x in eqn.outputs
        )
        if is_stored:
            moved += sum(x.num_bytes for x in (*eqn.outputs, *read))
            kernels += 1
        else:
            behind.update(dict.fromkeys(eqn.outputs, read))
    return moved, kernels


def _alone(eqn: Eqn) -> tuple[float, int]:
    """Returns the work of an operation that is not fused, or of its body."""
    match eqn.operation:
        case Scan(body=body, length=length):
            moved, kernels = fused_work(body)
            return length * moved, length * kernels
        case Cond(branches=branches):
            return max(map(fused_work, branches))
        case ShardMap(body=body, mesh=mesh, axes=axes):
            moved, kernels = fused_work(body)
            return math.prod(mesh.shape[axis] for axis in axes) * moved, kernels
        case PrimitiveCall(name=name, params=params) if name in _BODIES:
            return fused_work(to_graph(params[_BODIES[name]], keep_dead=True, prints=True))
        case PrimitiveCall(equation=equation, name=name) if name in (
            *_COLLECTIVES,
            ATTENTION.name,
        ) or _multiplies(equation):
            return 0.0, 1
    inputs = variables(eqn.inputs)
    if _name(eqn).startswith("scatter"):
        return 3.0 * inputs[-1].num_bytes, 1  # rows are read, added to, and written
    return float(sum(x.num_bytes for x in (*inputs, *eqn.outputs))), 1


def _multiplies(equation: Any) -> bool:
    """Returns whether an equation is a product, or a kernel with products."""
    if equation is None:
        return False
    inner = (e for body in jaxprs_in_params(equation.params) for e, _ in repeated_equations(body))
    return any(terms_of_product(e) is not None for e in (equation, *inner))


def _name(eqn: Eqn) -> str:
    return eqn.operation.name if isinstance(eqn.operation, PrimitiveCall) else ""


def reduces(eqn: Eqn) -> bool:
    return _name(eqn).startswith(("reduce_", "arg")) and _name(eqn) != "reduce_precision"


def _is_the_same_array(eqn: Eqn) -> bool:
    """Returns whether an equation has the elements of one array, with the same or other dims."""
    inputs = variables(eqn.inputs)
    if not inputs or not is_invertible_move(eqn):
        return False
    return inputs[0].aval.dtype == eqn.outputs[0].aval.dtype
