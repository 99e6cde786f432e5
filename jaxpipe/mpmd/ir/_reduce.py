"""Defines `treduce`, a loop over M microbatches in the order of a schedule, and its reductions.

Outside of `mpmd_jit_with_loop` the same loop is a plain scan, so a program can be run with and
without a pipeline.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray, Tracer
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding
from jaxtyping import PyTree

from ..._compat import ClosedJaxpr, without_refs


@runtime_checkable
class ReduceOp(Protocol):
    """A reduction: how the results of all microbatches become one array.

    Any object with these two methods can be an `operation` of `treduce`. Schedules may run
    microbatches in any order, so the result of `update` must not depend on their order. If a stage
    is on several ranks, a method `combine(state, other)` returns the array of two of them.
    """

    def state(self, n: int, a: jax.ShapeDtypeStruct) -> jax.Array:
        """Returns the array before the first microbatch.

        Args:
            n: The number of microbatches.
            a: The shape and dtype of one microbatch's result.

        Returns:
            An array of any shape and dtype, which `update` keeps.
        """
        ...

    def update(self, state: jax.Array, update: jax.Array, index: Any) -> jax.Array:
        """Returns the array after one more microbatch.

        Args:
            state: The array before this microbatch.
            update: The result of this microbatch.
            index: The index of this microbatch, an int32 scalar.

        Returns:
            An array with the shape and dtype of `state`.
        """
        ...


@dataclass(frozen=True)
class _Add:
    def state(self, n: int, a: jax.ShapeDtypeStruct) -> jax.Array:
        del n
        return jnp.zeros(a.shape, a.dtype)

    def update(self, state: Any, update: Any, index: Any) -> Any:
        del index
        return state + update

    def __repr__(self) -> str:
        return "Add"


@dataclass(frozen=True)
class _Max:
    def state(self, n: int, a: jax.ShapeDtypeStruct) -> jax.Array:
        del n
        return jnp.full(a.shape, _lowest_value(a.dtype), a.dtype)

    def update(self, state: Any, update: Any, index: Any) -> Any:
        del index
        return jnp.maximum(state, update)

    def __repr__(self) -> str:
        return "Max"


@dataclass(frozen=True)
class Concat:
    """Stacks the results of all microbatches along a new dim.

    Attributes:
        axis: The index of the new dim in the stacked array. A negative index counts from the end.

    Example:
        >>> from jaxpipe.mpmd import treduce
        >>> treduce(jnp.sum, jnp.ones((3, 2)), schedule="1f1b", operation=Concat()).tolist()
        [2.0, 2.0, 2.0]
    """

    axis: int = 0

    def state(self, n: int, a: jax.ShapeDtypeStruct) -> jax.Array:
        """Returns zeros of the shape of `a` with a new dim of size `n` at `axis`."""
        axis = self._of(a.ndim)
        return jnp.zeros((*a.shape[:axis], n, *a.shape[axis:]), a.dtype)

    def update(self, state: Any, update: Any, index: Any) -> Any:
        """Returns `state` with `update` written at `index` along `axis`."""
        return lax.dynamic_update_index_in_dim(state, update, index, self._of(update.ndim))

    def _of(self, ndim: int) -> int:
        if not -ndim - 1 <= self.axis <= ndim:
            raise ValueError(
                f"`operation` has Concat(axis={self.axis}) for a result with {ndim} dims. Give an "
                f"axis from {-ndim - 1} to {ndim}."
            )
        return self.axis % (ndim + 1)


@dataclass(frozen=True)
class _Last:
    """The reduction of a loop with one microbatch: the result of this microbatch."""

    def state(self, n: int, a: jax.ShapeDtypeStruct) -> jax.Array:
        assert n == 1
        return jnp.zeros(a.shape, a.dtype)

    def update(self, state: Any, update: Any, index: Any) -> Any:
        del state, index
        return update


Add = _Add()
"""The reduction that sums the results of the microbatches."""

Max = _Max()
"""The reduction that takes the elementwise maximum over the microbatches."""

Last = _Last()
"""The reduction that keeps the result of a single microbatch."""

DEFAULT = (Concat(), Add)

TREDUCE = "treduce"
treduce_p = Primitive(TREDUCE)
treduce_p.multiple_results = True


def treduce(
    fun: Callable[[Any], PyTree],
    xs: PyTree,
    schedule: Any,
    axis: int = 0,
    operation: PyTree = DEFAULT,
) -> PyTree:
    """Runs `fun` for every microbatch, in the order of a schedule, and reduces its results.

    Args:
        fun: `(slices of xs) -> out`, with marks between its stages. It may call
            `jax.value_and_grad`.
        xs: A pytree of arrays, [M, ...] if `axis` is 0.
        schedule: A `jaxpipe.schedules.Schedule`, or one of the classes under JaxPP's names.
        axis: The dim of size M, for microbatches, of every array of `xs`.
        operation: `Add`, `Max`, `Concat()` or an object with the methods of `ReduceOp`: one
            operation for all results, or a tree of operations that is a prefix of `out`. The
            default `(Concat(), Add)` suits a `fun` that returns the result of
            `jax.value_and_grad`: it stacks losses and metrics and adds gradients.

    Returns:
        A tree like `out`: each result, reduced over all microbatches by its operation.

    Raises:
        ValueError: If `xs` has no arrays, their sizes along `axis` differ, or `operation` is not a
            prefix of `out`.

    Example:
        >>> xs = jnp.arange(6.0).reshape(3, 2)  # 3 microbatches
        >>> float(treduce(jnp.sum, xs, schedule="1f1b", operation=Add))  # a scan
        15.0
    """
    shapes = [jnp.shape(x) for x in jax.tree.leaves(xs)]
    flat = [shape for shape in shapes if not -len(shape) <= axis < len(shape)]
    sizes = {shape[axis] for shape in shapes if shape not in flat}
    if len(sizes) != 1 or flat:
        where = "first dims" if axis == 0 else f"dims at `axis` {axis}"
        different = sorted({shape[axis : axis + 1] if axis >= 0 else shape for shape in shapes})
        raise ValueError(
            f"`xs` has arrays whose {where} are {different}. Give arrays that share this dim, the "
            "number of microbatches."
        )
    (count,) = sizes

    def of_microbatch(i: Any) -> PyTree:
        return fun(jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, axis, False), xs))

    return treduce_i(of_microbatch, count, schedule, operation)


def treduce_i(
    fun: Callable[[Any], PyTree],
    length: int,
    schedule: Any,
    operation: PyTree = DEFAULT,
    *,
    caller: str = TREDUCE,
) -> PyTree:
    """Runs `fun` for every microbatch index of `range(length)`, and reduces its results.

    Args:
        fun: `(index of the microbatch, an int32 scalar) -> out`, with marks between its stages.
        length: M, the number of microbatches.
        schedule: A `jaxpipe.schedules.Schedule`, or one of the classes under JaxPP's names.
        operation: `Add`, `Max`, `Concat()` or an object with the methods of `ReduceOp`: one
            operation for all results, or a tree of operations that is a prefix of `out`. The
            default is `(Concat(), Add)`.
        caller: The function that the user has called, for errors.

    Returns:
        A tree like `out`: each result, reduced over all microbatches by its operation.

    Raises:
        ValueError: If `length` is below 1, or `operation` is another or no prefix of `out`.
    """
    return treduce_with_shapes(fun, length, schedule, lambda shapes: operation, caller=caller)


def treduce_with_shapes(
    fun: Callable[[Any], PyTree],
    length: int,
    schedule: Any,
    operation_of: Callable[[PyTree], PyTree],
    *,
    caller: str,
) -> PyTree:
    """Runs `treduce_i` with the operation that follows from the shapes of `fun`'s results."""
    if length < 1:
        raise ValueError(f"`length`, the number of microbatches, is {length}. Give 1 or more.")
    closed, shape = jax.make_jaxpr(fun, return_shape=True)(jax.ShapeDtypeStruct((), jnp.int32))
    closed = without_refs(closed)
    if any(isinstance(const, jax.Ref) for const in closed.consts):
        raise ValueError(
            f"The function of `{caller}` reads or writes to a reference (`jax.new_ref`) that is "
            "made outside of it. Microbatches run on several groups, which share no memory: return "
            "the values and combine them by `operation`, or make the reference inside."
        )
    operations = _broadcast_operation(operation_of(shape), shape)
    reductions(closed.out_avals, operations, length)  # raises if one does not fit its result
    lifted = ClosedJaxpr(
        closed.jaxpr.replace(constvars=[], invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars]),
        (),
    )
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        # The types of results have shardings, which the primitive does not know.
        options = {"num_microbatches": length, "operations": operations}
        out = _scan(*closed.consts, jaxpr=lifted, **options)
        return jax.tree.structure(shape).unflatten(out)
    out = treduce_p.bind(
        *closed.consts,
        jaxpr=lifted,
        num_microbatches=length,
        schedule=schedule,
        operations=operations,
        caller=caller,
    )
    return jax.tree.structure(shape).unflatten(out)


def _broadcast_operation(operation: PyTree, shape: PyTree) -> tuple[ReduceOp, ...]:
    """Returns one operation for each result, given a prefix tree of operations."""

    def is_op(x: Any) -> bool:
        return isinstance(x, ReduceOp)

    operation = jax.tree.map(lambda op: op() if op is Concat else op, operation, is_leaf=is_op)
    for leaf in jax.tree.leaves(operation, is_leaf=is_op):
        if isinstance(leaf, type) or not isinstance(leaf, ReduceOp):
            raise ValueError(
                f"`operation` has {leaf!r}. Give Add, Max, Concat() or an object with the methods "
                "`state(n, a)` and `update(state, update, index)`."
            )
    try:
        spread = jax.tree.map(
            lambda op, part: [op] * len(jax.tree.leaves(part)), operation, shape, is_leaf=is_op
        )
    except ValueError:
        verb = "is by default" if operation == DEFAULT else "is"
        raise ValueError(
            f"`operation` {verb} {operation}, which is not a prefix of what a microbatch returns: "
            f"{jax.tree.structure(shape)}. Give one operation for all results, such as "
            "`operation=Add`, or a tree of them that is a prefix."
        ) from None
    return tuple(jax.tree.leaves(spread, is_leaf=is_op))


@dataclass(frozen=True)
class Reduction:
    """The reduction of one result, of this shape and dtype, over all microbatches."""

    operation: ReduceOp
    shape: tuple[int, ...]
    dtype: Any
    num_microbatches: int

    @property
    def adds(self) -> bool:
        """Returns whether the reduction is a sum, of which each stage may compute a part."""
        return is_add(self.operation)

    @property
    def aval(self) -> ShapedArray:
        shape = jax.eval_shape(self.init)
        return ShapedArray(shape.shape, shape.dtype)

    def init(self) -> jax.Array:
        """Returns the array before the first microbatch."""
        result = jax.ShapeDtypeStruct(self.shape, self.dtype)
        return self.operation.state(self.num_microbatches, result)

    def update(self, so_far: Any, new: Any, i: Any) -> Any:
        """Returns the array `so_far` after the result `new` of microbatch `i`."""
        return self.operation.update(so_far, jnp.asarray(new, self.dtype), i)


def is_add(operation: ReduceOp) -> bool:
    """Returns whether an operation is `Add`."""
    return isinstance(operation, _Add)


def _lowest_value(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf
    return False if dtype == jnp.bool_ else jnp.iinfo(dtype).min


def reductions(
    avals: Sequence[Any], operations: Sequence[ReduceOp], num_microbatches: int
) -> list[Reduction]:
    """Returns the reduction of each result of a microbatch."""
    of_results = [
        Reduction(operation, aval.shape, aval.dtype, num_microbatches)
        for aval, operation in zip(avals, operations, strict=True)
    ]
    for reduction, aval in zip(of_results, avals, strict=True):
        _check_reduction(reduction, aval)
    return of_results


def _check_reduction(reduction: Reduction, aval: Any) -> None:
    init = jax.eval_shape(reduction.init)
    result = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    update, end = jax.make_jaxpr(reduction.update, return_shape=True)(init, result, index)
    if any(isinstance(const, Tracer) for const in update.consts):
        raise ValueError(
            f"`operation` has {reduction.operation!r}, whose `update` reads an array that is "
            "traced outside of it. Scale or combine the results after the loop instead."
        )
    kinds = [[(x.shape, str(x.dtype)) for x in jax.tree.leaves(shape)] for shape in (init, end)]
    if kinds[0] != kinds[1] or len(kinds[0]) != 1:
        raise ValueError(
            f"`operation` has {reduction.operation!r}, whose `state` returns {kinds[0]} and whose "
            f"`update` returns {kinds[1]}. Let both return one array of the same shape and dtype."
        )


def _scan(
    *consts: Any, jaxpr: ClosedJaxpr, num_microbatches: int, operations: Any, **_: Any
) -> list[Any]:
    """Runs the loop without a pipeline, as a scan over microbatches."""
    each = reductions(jaxpr.out_avals, operations, num_microbatches)

    def turn(carry: list[Any], i: Any) -> tuple[list[Any], None]:
        new = jaxpr_as_fun(jaxpr)(*consts, i)
        return [t.update(x, y, i) for t, x, y in zip(each, carry, new, strict=True)], None

    indices = jnp.arange(num_microbatches, dtype=jnp.int32)
    init = [_with_type_of(aval, t) for aval, t in zip(jaxpr.out_avals, each, strict=True)]
    return lax.scan(turn, init, indices)[0]


def _with_type_of(aval: Any, reduction: Reduction) -> jax.Array:
    """Returns the array before the first microbatch, divided over explicit axes as results are."""
    init, operation, sharding = reduction.init(), reduction.operation, aval.sharding
    spec = sharding.spec
    if isinstance(operation, Concat):
        axis = operation.axis % (len(aval.shape) + 1)
        partitions = spec.partitions
        spec = spec.update(partitions=(*partitions[:axis], None, *partitions[axis:]))
    elif not isinstance(operation, _Add | _Max | _Last):
        return init
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return init
    return jax.sharding.reshard(init, NamedSharding(sharding.mesh, spec))


def _abstract(*consts: Any, jaxpr: Any, num_microbatches: int, operations: Any, **_: Any) -> Any:
    del consts
    each = reductions(jaxpr.out_avals, operations, num_microbatches)
    return [reduction.aval for reduction in each]


treduce_p.def_impl(lambda *consts, **params: jax.jit(lambda *c: _scan(*c, **params))(*consts))
treduce_p.def_abstract_eval(_abstract)
mlir.register_lowering(treduce_p, mlir.lower_fun(_scan, multiple_results=True))


def _refuse(what: str, instead: str, without_body: str) -> Callable[..., Any]:
    def rule(*args: Any, caller: str, **params: Any) -> Any:
        advice = instead if caller == TREDUCE else without_body
        raise ValueError(f"`{caller}` is called inside {what}. {advice}")

    return rule


ad.primitive_jvps[treduce_p] = _refuse(
    "a function that is differentiated",
    "Call `jax.value_and_grad` inside of the function that `treduce` is given: a schedule orders "
    "the backward of every microbatch too.",
    "The gradients of all parameters are the second result of `value_and_grad`.",
)
batching.primitive_batchers[treduce_p] = _refuse(
    "`jax.vmap`",
    "Call `jax.vmap` inside of the function that `treduce` is given.",
    "Call it once for each entry, in a Python loop.",
)
