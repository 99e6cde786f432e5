"""Combines arrays of several groups of a mesh, and moves arrays to the groups of another array.

The code after a loop calls these functions. The compiler runs any other equation on the groups that
hold its largest input, which is the right choice for weight updates.
"""

from collections.abc import Sequence
from functools import partial, reduce
from operator import add
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Shaped

T = TypeVar("T")

SUM, STACK, WITH = "cross_mpmd_all_reduce", "cross_mpmd_stack", "place_with"
CONCAT = "gather_multi"
add_multi_p = Primitive(SUM)
"""The primitive of `cross_mpmd_all_reduce`."""
stack_p = Primitive(STACK)
place_with_p = Primitive(WITH)
"""The primitive of `place_with`."""
gather_multi_p = Primitive(CONCAT)
"""The primitive that concatenates the arrays of several groups."""


def cross_mpmd_all_reduce(*args: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Returns the sum of arrays of several groups, on every group that has one of them.

    Python's `sum` returns the same numbers, but on one group only.

    Args:
        args: One array or more, all of one shape and dtype.

    Returns:
        The elementwise sum, with the shape and dtype of each of `args`.

    Raises:
        ValueError: If no array is given, or the arrays differ in shape or dtype.
    """
    _check_alike(SUM, args)
    return add_multi_p.bind(*args)


def cross_mpmd_stack(arrays: Sequence[Shaped[Array, "..."]], axis: int = 0) -> Shaped[Array, "..."]:
    """Stacks arrays of one or several groups into one array, which all these groups hold.

    Args:
        arrays: Arrays of one shape and dtype.
        axis: The index of the new dim in the result. A negative index counts from the end.

    Returns:
        An array with one dim more than each of `arrays`: the new dim has size `len(arrays)`.

    Raises:
        ValueError: If `arrays` is empty, the arrays differ in shape or dtype, or `axis` is out of
            range.
    """
    _check_alike(STACK, arrays)
    ndim = len(jnp.shape(arrays[0]))
    if not -ndim - 1 <= axis <= ndim:
        raise ValueError(
            f"`axis` is {axis}, and the stack of arrays of {ndim} dims has {ndim + 1} dims. Give "
            f"{-ndim - 1} to {ndim}."
        )
    return stack_p.bind(*arrays, axis=axis % (ndim + 1))


def place_with(x: T, other: Shaped[Array, "..."]) -> T:
    """Returns `x` on the groups that hold `other`, and on no other groups.

    Args:
        x: A pytree of arrays.
        other: An array. Only its groups are read, not its values.

    Returns:
        A pytree like `x`, with the same values.
    """
    return jax.tree.map(lambda leaf: place_with_p.bind(leaf, other), x)


def _check_alike(name: str, args: Sequence[Any]) -> None:
    kinds = {(jnp.shape(x), str(jnp.result_type(x))) for x in args}
    if len(kinds) != 1:
        raise ValueError(
            f"`{name}` is given arrays of {sorted(kinds)}. Give one array or more, all of one "
            "shape and dtype."
        )


def _define(primitive: Primitive, work: Any) -> None:
    primitive.def_impl(work)

    def abstract(*avals: Any, **params: Any) -> ShapedArray:
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        result = jax.eval_shape(partial(work, **params), *shapes)
        return ShapedArray(result.shape, result.dtype)

    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(work, multiple_results=False))


_define(add_multi_p, lambda *args: reduce(add, args))
_define(stack_p, lambda *args, axis: jnp.stack(args, axis))
_define(place_with_p, lambda x, other: x)
_define(gather_multi_p, lambda *args, axis=0: jnp.concatenate(args, axis))
