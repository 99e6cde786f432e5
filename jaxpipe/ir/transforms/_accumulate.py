"""Adds gradients to their accumulators where they are computed, in place.

The backward of a scan over layers returns its gradients stacked, in a buffer as large as all
weights, which is then added to the accumulator. After this pass every iteration adds its slice to
the accumulator in place, and the stacked buffer is never allocated. Sums have the dtype of the
accumulator.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Literal, jaxpr_as_fun
from jax.sharding import AxisType
from jaxtyping import PyTree

from ..._compat import ClosedJaxpr
from ..graph import (
    Atom,
    Cond,
    Eqn,
    Graph,
    PrimitiveCall,
    Scan,
    Var,
    count_uses,
    effects_of,
    is_cast,
    is_invertible_move,
    origin,
    pvary_like,
    select,
    shape_in,
    shape_out,
    to_graph,
    variables,
)


class Finish(NamedTuple):
    """What is done with a complete sum.

    Attributes:
        whole: Maps the sum to what replaces it.
        slice: Maps a slice of it along dim 0 to what replaces the slice. None: slices are left.
    """

    whole: Callable[[jax.Array], jax.Array]
    slice: Callable[[jax.Array], jax.Array] | None = None


@dataclass(frozen=True)
class Gradient:
    """An output of an equation that becomes a gradient of the program by data movement."""

    produced: Var
    way: tuple[Eqn, ...]
    start: Var
    total: Var
    finish: Finish | None = None


def accumulate(
    program: Graph, gradients: Sequence[bool], finish: Sequence[Finish | None] | None = None
) -> Graph:
    """Returns `(inputs, sums so far) -> outputs`, which has the new sum in place of each gradient.

    `gradients` is [num_outputs]: whether each output is a gradient, which then has a sum of its
    shape. `finish` has for each gradient what is done with its new sum, or, if a loop computes it,
    with each slice in its iteration: once, and under no condition, as it may communicate.
    """
    finish_of = iter(finish or [None] * sum(gradients))
    sums: list[Var] = []
    before: list[Eqn] = []
    added: list[Eqn] = []
    within: defaultdict[Eqn, list[Gradient]] = defaultdict(list)
    passed: set[Eqn] = set()  # movements of data whose outputs are not read any more
    outputs = list(program.outputs)
    makers = {value: eqn for eqn in program.eqns for value in eqn.outputs}
    uses = count_uses(program)
    for i in (i for i, is_gradient in enumerate(gradients) if is_gradient):
        aval = getattr(outputs[i], "aval", None)
        start, total, finish_sum = Var(aval), Var(aval), next(finish_of)
        sums.append(start)
        eqn, produced, way = origin(outputs[i], makers, uses, is_invertible_move)
        if eqn is not None and _is_zero(eqn, makers):
            total = start
        elif eqn is not None and _can_add(eqn, produced, way, makers):
            finish_slice = None
            if isinstance(eqn.operation, Scan) and finish_sum is not None and finish_sum.slice:
                finish_slice, finish_sum = Finish(finish_sum.slice), None
            within[eqn].append(Gradient(produced, way, start, total, finish_slice))
            passed.update(way)
        elif eqn is not None and _can_add_reshaped(eqn, produced, way):
            # Moved in front, as a sum, and back behind the loop.
            start_in_loop, total_in_loop = Var(produced.aval), Var(produced.aval)
            before.append(Eqn(_reshape(produced.aval.shape), (start,), (start_in_loop,)))
            within[eqn].append(Gradient(produced, (), start_in_loop, total_in_loop))
            added.append(Eqn(_reshape(total.aval.shape), (total_in_loop,), (total,)))
            passed.update(way)
        else:
            added.append(Eqn(_ADD, (start, outputs[i]), (total,)))
        if finish_sum is not None:
            total, done = Var(aval), total
            finishing = PrimitiveCall("finish", lambda x, whole=finish_sum.whole: [whole(x)])
            added.append(Eqn(finishing, (done,), (total,)))
        outputs[i] = total

    eqns = [eqn for eqn in program.eqns if eqn not in passed]
    eqns = [s for eqn in eqns for s in (_adding(eqn, within[eqn]) if eqn in within else [eqn])]
    return Graph((*program.inputs, *sums), (*before, *eqns, *added), tuple(outputs))


# Not an argument: additions are in programs that are made long before they are traced together.
# JAX's caches of traces do not see it, so it is set around the trace of a whole program.
_IN_PRODUCTS: ContextVar[bool] = ContextVar("additions_in_products", default=False)


@contextmanager
def additions_in_products(fuse: bool) -> Iterator[None]:
    """Makes programs that are traced within it add a product to its sum where it is computed.

    Without `fuse` they add it after a barrier.
    """
    token = _IN_PRODUCTS.set(fuse)
    try:
        yield
    finally:
        _IN_PRODUCTS.reset(token)


def cast_of_gradient(x: jax.Array, dtype: Any) -> jax.Array:
    """Casts a gradient to the dtype of its sum, in an operation of its own or in the product."""
    # XLA:TPU computes a product, its cast and its addition to a float32 sum in one fusion if no
    # barrier is between. With little vector memory that takes a third longer than one after the
    # other, and else no longer than the product (docs/dev/LOG.md, "Products that add").
    if x.dtype != dtype and not _IN_PRODUCTS.get():
        x = lax.optimization_barrier(x)
    return x.astype(dtype)


def _add(start: jax.Array, gradient: Any) -> list[jax.Array]:
    return [start + cast_of_gradient(jnp.asarray(gradient), start.dtype)]


_ADD = PrimitiveCall("add_to_sum", _add)


def _is_zero(eqn: Eqn, makers: Mapping[Var, Eqn]) -> bool:
    """Returns whether an equation returns an array of zeros."""
    operation = eqn.operation
    if not isinstance(operation, PrimitiveCall) or operation.equation is None:
        return False
    if operation.name in ("pvary", "pcast"):
        return all(v in makers and _is_zero(makers[v], makers) for v in variables(eqn.inputs))
    if operation.name != "broadcast_in_dim" or eqn.inputs:
        return False
    (fill,) = operation.equation.invars
    return isinstance(fill, Literal) and not np.any(fill.val)


def _can_add(eqn: Eqn, made: Var, way: Sequence[Eqn], makers: Mapping[Var, Eqn]) -> bool:
    """Returns whether an equation can take the sum so far, and return it plus the gradient."""
    match eqn.operation:
        case Scan():
            return _is_stacked(eqn, made) and all(_keeps_first_dim(moved) for moved in way)
        case Cond():
            return True
        case PrimitiveCall("scatter-add"):
            onto = [makers[v] for v in variables(eqn.inputs[:1]) if v in makers]
            is_onto_zeros = any(_is_zero(maker, makers) for maker in onto)
            return is_onto_zeros and len(eqn.inputs) == 3 and all(map(is_cast, way))
    return False


def _can_add_reshaped(eqn: Eqn, made: Var, way: Sequence[Eqn]) -> bool:
    """Returns whether a loop can take a reshaped sum, such as one over several layers at a time."""
    is_loop = isinstance(eqn.operation, Scan) and _is_stacked(eqn, made)
    return is_loop and all(is_cast(e) or getattr(e.operation, "name", "") == "reshape" for e in way)


def _is_stacked(loop: Eqn, made: Var) -> bool:
    """Returns whether an output of a loop has a slice of each iteration."""
    assert isinstance(loop.operation, Scan)
    return loop.outputs.index(made) >= loop.operation.num_carry


def _reshape(shape: tuple[int, ...]) -> PrimitiveCall:
    return PrimitiveCall("reshape", lambda x: [jnp.reshape(x, shape)])


def _keeps_first_dim(eqn: Eqn) -> bool:
    """Returns whether a data movement leaves the first dim, the layers of a scan, in place."""
    assert isinstance(eqn.operation, PrimitiveCall)
    permutation = eqn.operation.params.get("permutation")
    return permutation[0] == 0 if permutation else shape_in(eqn)[:1] == shape_out(eqn)[:1]


def _adding(eqn: Eqn, gradients: Sequence[Gradient]) -> list[Eqn]:
    """Returns an equation that adds some outputs to sums, cast to their manual axes first."""
    starts = [Var(gradient.produced.aval) for gradient in gradients]
    varied = [
        Eqn(
            PrimitiveCall("pcast", lambda x, aval=g.produced.aval: [pvary_like(aval, x)]),
            (g.start,),
            (start,),
        )
        for g, start in zip(gradients, starts, strict=True)
    ]
    produced = [gradient.produced for gradient in gradients]
    others = [value not in produced for value in eqn.outputs]
    outputs = (*select(eqn.outputs, others), *(gradient.total for gradient in gradients))
    match eqn.operation:
        case Scan() as loop:
            body = _body_adding(loop.body, eqn, others, gradients, num_dims=1)
            count = loop.num_accumulators + len(gradients)
            operation = replace(loop, body=body, num_accumulators=count)
        case Cond(branches, count):
            bodies = (_body_adding(b, eqn, others, gradients, num_dims=0) for b in branches)
            operation = Cond(tuple(bodies), count + len(gradients))
        case PrimitiveCall(params=params):
            operation = PrimitiveCall("scatter-add", partial(_scatter_add, params))
            return [*varied, Eqn(operation, (*starts, *eqn.inputs[1:]), outputs)]
    return [*varied, Eqn(operation, (*eqn.inputs, *starts), outputs)]


def _scatter_add(params: Mapping[str, Any], x: Any, indices: Any, updates: Any) -> list[jax.Array]:
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    how = {name: params[name] for name in names}
    return [lax.scatter_add(x, indices, updates.astype(x.dtype), **how)]


def _body_adding(
    body: Graph, eqn: Eqn, others: Sequence[bool], gradients: Sequence[Gradient], *, num_dims: int
) -> Graph:
    """Returns a body whose last inputs are the sums, and whose last outputs are the new sums.

    It also moves the data of gradients: its arrays lack the first `num_dims` dims of those outside.
    """
    inside = dict(zip(eqn.outputs, body.outputs, strict=True))
    eqns, ends = list(body.eqns), []
    for gradient in gradients:
        moves = list(_moves_inside(inside[gradient.produced], gradient.way, num_dims))
        eqns += moves
        ends.append(moves[-1].outputs[0] if moves else inside[gradient.produced])
    outputs = (*select(body.outputs, others), *ends)
    is_gradient = [False] * sum(others) + [True] * len(ends)
    adding = Graph(body.inputs, tuple(eqns), outputs)
    finish = [gradient.finish for gradient in gradients]
    return accumulate(adding, is_gradient, finish)


def _moves_inside(value: Atom, way: Sequence[Eqn], num_dims: int) -> Iterator[Eqn]:
    """Yields the equations of `way` without casts, for arrays without the first `num_dims` dims."""
    for eqn in way:
        if is_cast(eqn):  # the sum has its own dtype and sharding
            continue
        assert isinstance(eqn.operation, PrimitiveCall)
        shape = shape_out(eqn)[num_dims:]
        permutation = eqn.operation.params.get("permutation", ())[num_dims:]
        if permutation:
            permutation = tuple(dim - num_dims for dim in permutation)
            transpose = lambda x, order=permutation: [jnp.transpose(x, order)]  # noqa: E731
            move = PrimitiveCall("transpose", transpose, {"permutation": permutation})
        else:
            move = _reshape(shape)
        moved = Var(ShapedArray(shape, eqn.outputs[0].aval.dtype))
        yield Eqn(move, (value,), (moved,))
        value = moved


def add_gradients(sums: PyTree, f: Callable, *arguments: PyTree) -> tuple[PyTree, PyTree]:
    """Returns `sums` plus gradients, in place where possible, and the result that `f` has besides.

    `f` is `(*arguments) -> (gradients, result)`: gradients are like `sums`, with None where a leaf
    has none. Afterwards are added those of a function that prints, and of explicit axes, whose
    types the stacks of a loop would have to have.
    """
    closed, shapes = jax.make_jaxpr(f, return_shape=True)(*arguments)
    leaves, tree = jax.tree.flatten(sums)
    arrays, result = jax.tree.leaves(arguments), jax.tree.structure(shapes[1])
    if effects_of(closed) or _has_explicit_axes(closed):
        new = jaxpr_as_fun(closed)(*arrays)
        gradients = new[: len(leaves)]
        new[: len(leaves)] = [_add(*pair)[0] for pair in zip(leaves, gradients, strict=True)]
    else:
        is_gradient = [True] * len(leaves) + [False] * result.num_leaves
        new = accumulate(to_graph(closed), is_gradient)(*arrays, *leaves)
    return tree.unflatten(new[: len(leaves)]), result.unflatten(new[len(leaves) :])


def _has_explicit_axes(closed: ClosedJaxpr) -> bool:
    """Returns whether a program outside of `jax.shard_map` reads arrays that are typed by axes."""

    def axis_types(aval: Any) -> tuple[AxisType, ...]:
        return aval.sharding.mesh.axis_types

    types = {kind for aval in closed.in_avals for kind in axis_types(aval)}
    return AxisType.Explicit in types and AxisType.Manual not in types
