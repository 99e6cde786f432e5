"""A loop over microbatches whose results are put together: what a schedule may order.

M microbatches. Outside of `mpmd.jit` the same loop is a plain scan, so a program can be run with
and without a pipeline.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jaxtyping import PyTree


class Operation(Enum):
    """How results of microbatches become one."""

    ADD = "add"
    MAX = "max"
    CONCAT = "concat"
    LAST = "last"

    def __repr__(self) -> str:
        return self.value.capitalize()


Add, Max, Concat = Operation.ADD, Operation.MAX, Operation.CONCAT
Last = Operation.LAST

NAME = "treduce"
treduce_p = Primitive(NAME)
treduce_p.multiple_results = True


def treduce(
    f: Callable[[Any], PyTree], xs: PyTree, *, schedule: Any, operation: PyTree = Add
) -> PyTree:
    """Runs `f` for every microbatch, in the order of a schedule, and reduces its results.

    Args:
        f: `(slices of xs) -> out`, with marks between its stages. It may contain its own
            `jax.value_and_grad`.
        xs: A pytree of [M, ...] arrays.
        schedule: A `jaxpipe.schedules.Schedule`, or one of the classes under JaxPP's names.
        operation: `Add`, `Max` or `Concat`, one for all results or a tree of them that is a
            prefix of `out`.

    Returns:
        Like `out`: sums or maxima over microbatches, or [M, ...] arrays of all results.

    Raises:
        ValueError: If there is nothing to slice, or arrays disagree about M.
    """
    sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves(xs)}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(
            f"`xs` has arrays whose first dims are {sorted(sizes)}. Give arrays that share the "
            "first dim, the number of microbatches."
        )
    ((count,),) = sizes

    def of_microbatch(i: Any) -> PyTree:
        return f(jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), xs))

    return treduce_i(of_microbatch, count, schedule=schedule, operation=operation)


def treduce_i(
    f: Callable[[Any], PyTree],
    num_microbatches: int,
    *,
    schedule: Any,
    operation: PyTree = Add,
) -> PyTree:
    """`treduce` over `range(num_microbatches)`: `f` is given the number of the microbatch.

    Args:
        f: `(int32 scalar) -> out`.
        num_microbatches: M.
        schedule: As in `treduce`.
        operation: As in `treduce`.

    Raises:
        ValueError: If M is below 1, or `operation` names something else.
    """
    if num_microbatches < 1:
        raise ValueError(f"`num_microbatches` is {num_microbatches}. Give 1 or more.")
    closed, shape = jax.make_jaxpr(f, return_shape=True)(jax.ShapeDtypeStruct((), jnp.int32))
    operations = _broadcast(operation, shape)
    jaxpr = closed.jaxpr
    lifted = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    out = treduce_p.bind(
        *closed.consts,
        jaxpr=ClosedJaxpr(lifted, ()),
        num_microbatches=num_microbatches,
        schedule=schedule,
        operations=operations,
    )
    return jax.tree.structure(shape).unflatten(out)


def _broadcast(operation: PyTree, shape: PyTree) -> tuple[Operation, ...]:
    leaves = jax.tree.leaves(operation)
    wrong = [leaf for leaf in leaves if not isinstance(leaf, Operation)]
    if wrong:
        raise ValueError(f"`operation` has {wrong[0]!r}. Give Add, Max or Concat.")
    spread = jax.tree.map(lambda op, part: jax.tree.map(lambda _: op, part), operation, shape)
    return tuple(jax.tree.leaves(spread))


@dataclass(frozen=True)
class Total:
    """How one result is put together: [] or [M] of what a microbatch gives."""

    operation: Operation
    shape: tuple[int, ...]
    dtype: Any
    num_microbatches: int

    @property
    def aval(self) -> ShapedArray:
        shape = jax.eval_shape(self.start)
        return ShapedArray(shape.shape, shape.dtype)

    def start(self) -> jax.Array:
        """Before the first microbatch."""
        match self.operation:
            case Operation.ADD | Operation.LAST:
                return jnp.zeros(self.shape, self.dtype)
            case Operation.MAX:
                return jnp.full(self.shape, _lowest(self.dtype), self.dtype)
            case Operation.CONCAT:
                return jnp.zeros((self.num_microbatches, *self.shape), self.dtype)

    def with_result(self, so_far: Any, new: Any, i: Any) -> Any:
        """After microbatch `i`."""
        match self.operation:
            case Operation.ADD:
                return so_far + new
            case Operation.MAX:
                return jnp.maximum(so_far, new)
            case Operation.CONCAT:
                return lax.dynamic_update_index_in_dim(so_far, new, i, 0)
            case Operation.LAST:
                return new


def _lowest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf
    return False if dtype == jnp.bool_ else jnp.iinfo(dtype).min


def totals(
    avals: Sequence[Any], operations: Sequence[Operation], num_microbatches: int
) -> list[Total]:
    """One for each result of a microbatch, given what it looks like."""
    return [
        Total(operation, aval.shape, aval.dtype, num_microbatches)
        for aval, operation in zip(avals, operations, strict=True)
    ]


def _scan(
    *consts: Any, jaxpr: ClosedJaxpr, num_microbatches: int, schedule: Any, operations: Any
) -> list[Any]:
    """The loop without a pipeline."""
    del schedule
    each = totals(jaxpr.out_avals, operations, num_microbatches)

    def turn(carry: list[Any], i: Any) -> tuple[list[Any], None]:
        new = jaxpr_as_fun(jaxpr)(*consts, i)
        return [t.with_result(x, y, i) for t, x, y in zip(each, carry, new, strict=True)], None

    return lax.scan(turn, [t.start() for t in each], jnp.arange(num_microbatches))[0]


def _abstract(*consts: Any, jaxpr: Any, num_microbatches: int, operations: Any, **_: Any) -> Any:
    del consts
    each = totals(jaxpr.out_avals, operations, num_microbatches)
    return [total.aval for total in each]


treduce_p.def_impl(lambda *consts, **params: jax.jit(lambda *c: _scan(*c, **params))(*consts))
treduce_p.def_abstract_eval(_abstract)
mlir.register_lowering(treduce_p, mlir.lower_fun(_scan, multiple_results=True))
