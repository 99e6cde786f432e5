"""Finds out which inputs of a function an output depends on, and computes that output alone."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Literal, jaxpr_as_fun
from jax.interpreters import partial_eval
from jaxtyping import PyTree

from .._compat import ClosedJaxpr
from ..ir.graph import bind


def dependent_inputs(function: Callable, *arguments: PyTree) -> tuple[list[PyTree], Any]:
    """Returns the inputs that each leaf of the output depends on, and the structure of the output.

    For a leaf it is a tree like `arguments` of booleans. Arrays may be given as shapes.
    """
    closed, out = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return used_inputs(closed, arguments), jax.tree.structure(out)


def used_inputs(closed: ClosedJaxpr, arguments: PyTree) -> list[PyTree]:
    """Returns for every output of a program what it reads, booleans in a tree like arguments."""
    tree, count = jax.tree.structure(arguments), len(closed.jaxpr.outvars)
    used = []
    for i in range(count):
        _, of_output = partial_eval.dce_jaxpr(closed.jaxpr, [j == i for j in range(count)])
        used.append(jax.tree.unflatten(tree, of_output))
    return used


def pruned(function: Callable, *arguments: PyTree) -> tuple[Callable, PyTree]:
    """Returns a function without equations that its output does not depend on, and what it reads.

    That is a tree like `arguments` of booleans; all other leaves may be anything.
    """
    closed, out = jax.make_jaxpr(function, return_shape=True)(*arguments)
    closed = rewritten(closed, _lookup)
    jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    run, tree = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts)), jax.tree.structure(out)

    def part(*arguments: PyTree) -> PyTree:
        leaves = jax.tree.leaves(arguments)
        read = [x for x, is_used in zip(leaves, used, strict=True) if is_used]
        return jax.tree.unflatten(tree, run(*read))

    return part, jax.tree.unflatten(jax.tree.structure(arguments), used)


def rewritten(closed: ClosedJaxpr, other: Callable[[Any], Callable | None]) -> ClosedJaxpr:
    """Returns a program with other functions in place of some equations.

    `other(equation)` is a function of its inputs that returns a list of results; None to keep it.
    """
    others = [other(eqn) for eqn in closed.jaxpr.eqns]
    if not any(others):
        return closed

    def run(*leaves: Any) -> list[Any]:
        jaxpr, values = closed.jaxpr, {}
        values |= zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *leaves], strict=True)
        for eqn, function in zip(jaxpr.eqns, others, strict=True):
            if function:
                read = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
                results = function(*read)
            else:
                read = [values[v] for v in eqn.invars if not isinstance(v, Literal)]
                results = bind(eqn, jaxpr)(*read)
            values |= zip(eqn.outvars, results, strict=True)
        return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]

    return jax.make_jaxpr(run)(*closed.in_avals)


def _lookup(eqn: Any) -> Callable | None:
    """Returns a gather of whole rows by their index alone, where the others could only be 0.

    `jax.vmap(lambda token: weight[token])` gathers by the indices of all dims. Of such a gradient
    XLA:TPU makes a loop over tokens, 2.5 microseconds each (libtpu 0.0.48.1).
    """
    modes = jax.lax.GatherScatterMode.CLIP, jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
    if eqn.primitive.name != "gather" or eqn.params["mode"] not in modes:
        return None
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape, dims = eqn.invars[0].aval.shape, numbers.start_index_map
    free = [i for i, dim in enumerate(dims) if sizes[dim] != shape[dim]]
    if len(free) != 1 or len(dims) == 1 or sizes[dims[free[0]]] != 1:
        return None
    (at,), dim = free, dims[free[0]]
    if numbers.operand_batching_dims or dim in numbers.collapsed_slice_dims:
        return None
    # XLA knows a lookup by the dim that is left out, so it is put back.
    of_slice = [d for d in range(len(shape)) if d not in numbers.collapsed_slice_dims]
    axis = numbers.offset_dims[of_slice.index(dim)]
    params = dict(eqn.params)
    params["dimension_numbers"] = numbers._replace(
        offset_dims=tuple(i - (i > axis) for i in numbers.offset_dims if i != axis),
        collapsed_slice_dims=tuple(sorted((*numbers.collapsed_slice_dims, dim))),
        start_index_map=(dim,),
    )

    def gather(operand: Any, indices: Any) -> list[Any]:
        own = jax.lax.slice_in_dim(indices, at, at + 1, axis=indices.ndim - 1)
        return [jax.lax.expand_dims(eqn.primitive.bind(operand, own, **params), (axis,))]

    return gather
