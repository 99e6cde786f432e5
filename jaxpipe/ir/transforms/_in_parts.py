"""Computes a result of a program in parts, of which each can be sent while the next is computed.

The last product of a layer, and what follows it entry by entry, is computed for some tokens after
the others. Otherwise a rank has nothing left to compute when its result is sent.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, jaxpr_as_fun
from jaxtyping import PyTree

from ..._compat import ClosedJaxpr
from ..graph import (
    Atom,
    Eqn,
    Graph,
    PrimitiveCall,
    Var,
    aval_of,
    count_uses,
    effects_of,
    is_entrywise,
    partitioned_axes,
    to_graph,
)

_LEAST_BYTES = 2**22
"""A smaller result is sent in no more time than it takes to start the transfer of a part."""

_SHARES = (2, 4, 8, 8)
"""Parts are a half, a quarter and two eighths: each is sent during the next, which takes longer."""

LAST_PART = 1 / _SHARES[-1]
"""The share of a result that is sent when nothing is left to compute."""


Dims = list[int | None]
"""The dim along which each input of an equation is cut; None for one that is read whole."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InParts:
    """An array as parts along the dim `dim`, in order."""

    parts: tuple[jax.Array, ...]
    dim: int = field(metadata={"static": True})


def _is_in_parts(x: Any) -> bool:
    return isinstance(x, InParts)


def join_parts(tree: PyTree) -> PyTree:
    """Returns `tree` with arrays in place of those that are `InParts`."""

    def join(x: Any) -> Any:
        return jnp.concatenate(x.parts, x.dim) if _is_in_parts(x) else x

    return jax.tree.map(join, tree, is_leaf=_is_in_parts)


def first_parts(tree: PyTree) -> PyTree:
    """Returns `tree` with the first part in place of each `InParts`."""
    return jax.tree.map(lambda x: x.parts[0] if _is_in_parts(x) else x, tree, is_leaf=_is_in_parts)


def with_first_parts(tree: PyTree, first: PyTree) -> PyTree:
    """Returns `tree` with what `first_parts` returned, or arrays like them, in its place."""

    def put(x: Any, new: jax.Array) -> Any:
        return InParts((new, *x.parts[1:]), x.dim) if _is_in_parts(x) else new

    return jax.tree.map(put, tree, first, is_leaf=_is_in_parts)


def results_in_parts(closed: ClosedJaxpr, num_results: int) -> Callable[..., list[Any]]:
    """Returns a program as a function whose first results are `InParts` where they can be."""
    whole = jaxpr_as_fun(closed)
    large = [i for i, aval in enumerate(closed.out_avals[:num_results]) if _is_large(aval)]
    # XLA's partitioner would move what it divides, as it is cut.
    if not large or partitioned_axes() or effects_of(closed):
        return whole
    program, dims = to_graph(closed), {}
    for i in reversed(large):  # each is replaced by its parts, which moves those behind it
        if (cut := _cut(program, i)) is not None:
            program, dims[i] = cut
    if not dims:
        return whole

    def run(*inputs: Any) -> list[Any]:
        values = program(*inputs)
        for i in sorted(dims):
            values[i : i + len(_SHARES)] = [InParts(tuple(values[i : i + len(_SHARES)]), dims[i])]
        return values

    return run


def _is_large(aval: Any) -> bool:
    return aval.size * aval.dtype.itemsize >= _LEAST_BYTES


def _cut(program: Graph, index: int) -> tuple[Graph, int] | None:
    """Returns the program with parts in place of an output, and the dim they are cut along.

    None if the output cannot be cut.
    """
    result = program.outputs[index]
    if not isinstance(result, Var):
        return None
    shape = result.aval.shape
    # Not the last dim, which a product makes of its weights.
    dim = max(range(len(shape) - 1), key=lambda dim: shape[dim], default=None)
    if dim is None or shape[dim] % max(_SHARES):
        return None
    tail = _tail(program, result, dim)
    if not any(map(_is_product, tail)):
        return None

    eqns = [eqn for eqn in program.eqns if eqn not in tail]
    parts, start = [], 0
    for share in _SHARES:
        part = slice(start, start + shape[dim] // share)
        cut: dict[tuple[Atom, int | None], Atom] = {}
        for eqn, (out, dims) in reversed(tail.items()):
            inputs = list(zip(eqn.inputs, dims, strict=True))
            for atom, at in inputs:
                if at is None:
                    cut[atom, at] = atom
                elif (atom, at) not in cut:
                    new = Var(aval_of(atom))
                    eqns.append(Eqn(_slice(at, part), (atom,), (new,)))
                    cut[atom, at] = new
            new = Var(eqn.outputs[0].aval)
            cut[eqn.outputs[0], out] = new
            eqns.append(Eqn(_for_part(eqn, out, share), tuple(cut[x] for x in inputs), (new,)))
        parts.append(cut[result, dim])
        start = part.stop
    outputs = (*program.outputs[:index], *parts, *program.outputs[index + 1 :])
    return Graph(program.inputs, tuple(eqns), outputs), dim


def _slice(dim: int, part: slice) -> PrimitiveCall:
    return PrimitiveCall("slice", lambda x: [lax.slice_in_dim(x, part.start, part.stop, axis=dim)])


def _for_part(eqn: Eqn, dim: int, share: int) -> Any:
    """Returns the operation of an equation for a share of the entries of a dim of its output."""
    operation = eqn.operation
    if not isinstance(operation, PrimitiveCall) or operation.name != "broadcast_in_dim":
        return operation
    to, shape = operation.params["broadcast_dimensions"], list(operation.params["shape"])
    shape[dim] //= share
    return PrimitiveCall("broadcast_in_dim", lambda x: [lax.broadcast_in_dim(x, shape, to)])


def _tail(program: Graph, result: Var, dim: int) -> dict[Eqn, tuple[int, Dims]]:
    """Returns the equations that compute a result alone, the last first, up to products.

    Maps each to the dims along which its output and its inputs are cut.
    """
    uses = count_uses(program)
    read: defaultdict[Atom, list[int]] = defaultdict(list, {result: [dim]})
    tail: dict[Eqn, tuple[int, Dims]] = {}
    for eqn in reversed(program.eqns):
        reads = read[eqn.outputs[0]] if len(eqn.outputs) == 1 else []
        if not reads or len(reads) < uses[eqn.outputs[0]] or len(set(reads)) > 1:
            continue
        dims = _dims_of_inputs(eqn, reads[0])
        if dims is None:
            continue
        tail[eqn] = reads[0], dims
        if not _is_product(eqn):
            for atom, at in zip(eqn.inputs, dims, strict=True):
                if at is not None:
                    read[atom].append(at)
    return tail


def _is_product(eqn: Eqn) -> bool:
    return isinstance(eqn.operation, PrimitiveCall) and eqn.operation.name == "dot_general"


def _dims_of_inputs(eqn: Eqn, dim: int) -> Dims | None:
    """Returns the dims to cut the inputs by for a cut of the output; None if that is no cut."""
    operation = eqn.operation
    if not isinstance(operation, PrimitiveCall) or operation.equation is None:
        return None
    if any(isinstance(x, Literal) and np.shape(x.val) for x in operation.equation.invars):
        return None  # an array that is no input of `eqn` and would stay whole
    params, shape = operation.params, eqn.outputs[0].aval.shape
    shapes = [aval_of(atom).shape for atom in eqn.inputs]
    if is_entrywise(eqn):  # of one entry, or of entries that stand for all of a dim of size 1
        return [dim if x and x[dim] == shape[dim] else None for x in shapes]
    match operation.name, shapes:
        case "dot_general", [left, right]:
            (*contracted,), (*batch,) = params["dimension_numbers"]
            free = [
                [d for d in range(len(x)) if d not in (*c, *b)]
                for x, c, b in zip((left, right), contracted, batch, strict=True)
            ]
            dims = [
                *zip(*batch, strict=True),
                *((d, None) for d in free[0]),
                *((None, d) for d in free[1]),
            ]
            return list(dims[dim])
        case "broadcast_in_dim", [source]:
            to = params["broadcast_dimensions"]
            at = to.index(dim) if dim in to else None
            return [at] if at is not None and source[at] == shape[dim] else None
        case "reduce_sum" | "reduce_max", [source]:
            kept = [d for d in range(len(source)) if d not in params["axes"]]
            return [kept[dim]]
    return None
