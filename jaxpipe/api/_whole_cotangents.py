"""Calls a `jax.custom_vjp`, which need not be linear, as the plain program of a microbatch does."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..autodiff.staged_model import accum_dtype, has_custom_vjp
from ..sharding import match_varying_axes


def with_whole_cotangents(function: Callable, axes: tuple[str, ...]) -> Callable:
    """Returns `function`; if it has a `jax.custom_vjp`, that is given the cotangents of all rows.

    Each device starts from the cotangents of its own rows, or its share of the loss, and gradients
    are summed over devices. That is right for linear backwards only. So cotangents of results are
    summed over devices before the backward, and those of arguments divided by the devices after it.
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


def without_cotangents_unless(busy: Array, tree: PyTree) -> PyTree:
    """Returns `tree`, whose floating-point cotangents are zeros unless a device is busy.

    In an idle tick a backward is given zeros, and a `jax.custom_vjp` need not return zeros: it may
    add noise, or divide by the norm of what it is given.
    """

    @jax.custom_vjp
    def run(busy: Array, tree: PyTree) -> PyTree:
        return tree

    def backward(busy: Array, cotangents: PyTree) -> tuple[None, PyTree]:
        return None, _map_floats(lambda x: jnp.where(busy, x, jnp.zeros_like(x)), cotangents)

    run.defvjp(lambda busy, tree: (tree, busy), backward)
    return run(busy, tree)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_cotangents(change: Callable[[Array], Array], tree: PyTree) -> PyTree:
    """Returns `tree`, whose floating-point cotangents are changed."""
    return tree


_with_cotangents.defvjp(
    lambda change, tree: (tree, None),
    lambda change, _, cotangents: (_map_floats(change, cotangents),),
)


def _map_floats(change: Callable[[Array], Array], tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: change(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x, tree)
