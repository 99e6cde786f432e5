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

    def run(*arguments: Any) -> Any:
        if not has_custom_vjp(function, *arguments):
            return function(*arguments)
        shared: Any = _with_cotangents(partial(_share, axes), (), arguments)
        results = match_varying_axes(jax.lax.axis_index(axes), function(*shared))
        return _with_cotangents(partial(_total, axes), (), results)

    return run


def in_accum_dtype(collective: Callable, x: Array, axes: tuple[str, ...]) -> Array:
    """Returns `collective(x, axes)`, which sums in the dtype of sums, in the dtype of `x`."""
    # XLA:CPU aborts on sums of bfloat16 ("Invalid binary instruction opcode copy").
    total = collective(x.astype(accum_dtype(x.dtype)), axes).astype(x.dtype)
    return match_varying_axes(x, total)


def without_cotangents_unless(busy: Array, tree: PyTree) -> PyTree:
    """Returns `tree`, whose floating-point cotangents are zeros unless a device is busy.

    In an idle tick a backward is given zeros, and a `jax.custom_vjp` need not return zeros: it may
    add noise, or divide by the norm of what it is given.
    """
    return _with_cotangents(_only_if, busy, tree)


def _share(axes: tuple[str, ...], _: Any, x: Array) -> Array:
    return x / jax.lax.axis_size(axes)


def _total(axes: tuple[str, ...], _: Any, x: Array) -> Array:
    return in_accum_dtype(jax.lax.psum, x, axes)


def _only_if(busy: Array, x: Array) -> Array:
    return jnp.where(busy, x, jnp.zeros_like(x))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_cotangents(change: Callable[[Any, Array], Array], constant: Any, tree: PyTree) -> PyTree:
    """Returns `tree`, whose floating-point cotangents x become `change(constant, x)`."""
    return tree


def _backward(
    change: Callable[[Any, Array], Array], constant: Any, cotangents: PyTree
) -> tuple[None, PyTree]:
    def changed(x: Array) -> Array:
        return change(constant, x) if jnp.issubdtype(x.dtype, jnp.inexact) else x

    return None, jax.tree.map(changed, cotangents)


_with_cotangents.defvjp(lambda change, constant, tree: (tree, constant), _backward)
