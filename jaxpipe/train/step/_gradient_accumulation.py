"""Several calls of an engine in one step, one after the other: gradients add up over them.

A calls, M microbatches in each.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from ...autodiff import fold

Reshard = Callable[[PyTree], PyTree]


def gradient_accumulation(
    f: Callable[[PyTree, PyTree, PyTree], PyTree],
    num_steps: int,
    *,
    reshard: Reshard = lambda found: found,
) -> Callable[[PyTree, PyTree, PyTree], PyTree]:
    """`f(weights, side, keys)` of [A * M, ...] leaves of `side`, M at a time.

    Its results add up in float32. Every call has dropout masks of its own.

    Args:
        f: What returns sums over microbatches: a loss, metrics, gradients.
        num_steps: A.
        reshard: Lays out what adds up.
    """
    if num_steps == 1:
        return f

    def run(weights: PyTree, side: PyTree, keys: PyTree) -> PyTree:
        def call(sums: PyTree, one: PyTree) -> tuple[PyTree, None]:
            index, part = one
            found = f(weights, part, fold(keys, index))
            return reshard(jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, found)), None

        parts = jax.tree.map(lambda x: x.reshape(num_steps, -1, *x.shape[1:]), side)
        first = jax.tree.map(lambda x: x[0], parts)
        found = jax.eval_shape(f, weights, first, keys)
        nothing = reshard(jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), found))
        sums, _ = lax.scan(call, nothing, (jnp.arange(num_steps), parts))
        return jax.tree.map(lambda x, like: x.astype(like.dtype), sums, found)

    return run


def unrolled_gradient_accumulation(
    f: Callable[[PyTree, PyTree, PyTree], PyTree], num_steps: int
) -> Callable[[PyTree, PyTree, PyTree], PyTree]:
    """The same written out, for programs of ranks: their loops are those over microbatches."""

    def run(weights: PyTree, side: PyTree, keys: PyTree) -> PyTree:
        size = jax.tree.leaves(side)[0].shape[0] // num_steps
        parts = (
            jax.tree.map(lambda x: x[call * size : (call + 1) * size], side)  # noqa: B023
            for call in range(num_steps)
        )
        found = [f(weights, part, fold(keys, call)) for call, part in enumerate(parts)]
        return jax.tree.map(added, *found)

    def added(*found: jax.Array) -> jax.Array:
        first, *others = (x.astype(jnp.float32) for x in found)
        return sum(others, start=first).astype(found[0].dtype)

    return run if num_steps > 1 else f
