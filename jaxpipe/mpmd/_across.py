"""Values of several groups in one, and values where others are: for what a loop is followed by.

Without them a step goes where the largest of what it reads is, which is right for updates.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Shaped

T = TypeVar("T")

SUM, STACK, WITH = "cross_mpmd_all_reduce", "cross_mpmd_stack", "place_with"
sum_p, stack_p, with_p = map(Primitive, (SUM, STACK, WITH))


def cross_mpmd_all_reduce(*args: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """The sum of arrays of several groups, on every group that has one of them.

    Args:
        args: Arrays of one shape and dtype. Python's `sum` gives the same numbers, on one group.

    Raises:
        ValueError: If there is none, or they differ in shape or dtype.
    """
    _check_alike(SUM, args)
    return sum_p.bind(*args)


def cross_mpmd_stack(*args: Shaped[Array, "..."]) -> Shaped[Array, "n ..."]:
    """Arrays of several groups, or of one, as one array with a new first dim, on all these groups.

    Args:
        args: Arrays of one shape and dtype.

    Raises:
        ValueError: If there is none, or they differ in shape or dtype.
    """
    _check_alike(STACK, args)
    return stack_p.bind(*args)


def place_with(x: T, other: Shaped[Array, "..."]) -> T:
    """`x`, where `other` is: on all groups that have it, and on no others.

    Args:
        x: A pytree of arrays.
        other: An array of which only the place counts.
    """
    return jax.tree.map(lambda leaf: with_p.bind(leaf, other), x)


def _check_alike(name: str, args: tuple[Any, ...]) -> None:
    kinds = {(jnp.shape(x), str(jnp.result_type(x))) for x in args}
    if len(kinds) != 1:
        raise ValueError(
            f"`{name}` is given arrays of {sorted(kinds)}. Give one array or more, all of one "
            "shape and dtype."
        )


def _sum(*args: Any) -> Any:
    total = args[0]
    for x in args[1:]:
        total = total + x
    return total


def _stack(*args: Any) -> Any:
    return jnp.stack(args)


def _first(x: Any, other: Any) -> Any:
    del other
    return x


def _define(primitive: Primitive, work: Any) -> None:
    primitive.def_impl(work)
    primitive.def_abstract_eval(lambda *avals: _aval(jax.eval_shape(work, *map(_shape, avals))))
    mlir.register_lowering(primitive, mlir.lower_fun(work, multiple_results=False))


def _shape(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _aval(shape: jax.ShapeDtypeStruct) -> ShapedArray:
    return ShapedArray(shape.shape, shape.dtype)


_define(sum_p, _sum)
_define(stack_p, _stack)
_define(with_p, _first)
