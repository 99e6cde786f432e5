"""Backwards of functions that all devices run alike, each on all rows of a microbatch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..autodiff.staged_model import accum_dtype, has_custom_vjp
from ..sharding import match_varying_axes


def with_whole_cotangents(function: Callable, axes: tuple[str, ...]) -> Callable:
    """Returns a function whose own backward, if it has one, is given the cotangents of all rows.

    A device pulls back what its own rows, or its share of a loss, are given, and gradients are the
    sums over devices: that is right for backwards that are linear. A `jax.custom_vjp` need not be:
    it may clip what it is given, or scale it by the largest of all.
    """

    def total(x: Array) -> Array:  # XLA:CPU cannot sum in bfloat16
        summed = jax.lax.psum(x.astype(accum_dtype(x.dtype)), axes).astype(x.dtype)
        return match_varying_axes(x, summed)

    def share(x: Array) -> Array:
        return x / jax.lax.axis_size(axes)

    def run(*arguments: Any) -> Any:
        if not has_custom_vjp(function, *arguments):
            return function(*arguments)
        shared: Any = _with_cotangents(share, arguments)
        results = function(*shared)
        return _with_cotangents(total, match_varying_axes(jax.lax.axis_index(axes), results))

    return run


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_cotangents(change: Callable[[Array], Array], tree: PyTree) -> PyTree:
    """Returns `tree`, whose floating-point cotangents are changed."""
    return tree


def _backward(change: Callable[[Array], Array], _: None, cotangents: PyTree) -> tuple[PyTree]:
    def changed(x: Array) -> Array:
        return change(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x

    return (jax.tree.map(changed, cotangents),)


_with_cotangents.defvjp(lambda change, tree: (tree, None), _backward)
