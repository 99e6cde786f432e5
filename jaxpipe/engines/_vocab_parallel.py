"""A loss that all ranks compute together, each with a part of the vocabulary, and its gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree, Scalar

from ..autodiff.backward import combine, floating
from ..autodiff.staged_model import accum_dtype
from ..sharding import varying_axes
from ..spmd.ranks import pvary


def loss_on_ranks(loss: Callable) -> Callable:
    """Returns `StagedModel.vocab_parallel_loss` of a loss that the ranks compute together.

    Args:
        loss: `(boundary, y, inputs_m, axis) -> (loss, metrics)`, equal on all ranks of the axis.

    Returns:
        `(boundary, y, inputs_m, axis) -> ((loss, metrics), (boundary_grads, dy))`, by JAX's
        derivative of what each rank computes.
    """

    def run(boundary: dict[str, PyTree], y: PyTree, inputs_m: PyTree, axis: str) -> Any:
        boundary, y = jax.tree.map(pvary, (boundary, y))

        def mean(boundary: dict[str, PyTree], differentiated: PyTree) -> tuple[Scalar, Any]:
            """Returns the part of a rank in the mean of all ranks' losses, which are equal."""
            results = loss(boundary, combine(differentiated, y), inputs_m, axis)
            num_parts = jax.lax.axis_size(axis) if axis in varying_axes(results[0]) else 1
            return results[0] / num_parts, results

        of_ranks = jax.grad(mean, argnums=(0, 1), has_aux=True)
        (boundary_grads, dy), results = of_ranks(boundary, floating(y))
        is_first = jax.lax.axis_index(axis) == 0
        once = jax.tree.map(lambda x: jnp.where(is_first, x, jnp.zeros_like(x)), results)
        return once, (boundary_grads, jax.tree.map(lambda x: _sum_over(axis, x), dy))

    return run


def _sum_over(axis: str, x: jax.Array) -> jax.Array:
    """Returns the sum over ranks, of 16 bits in float32."""
    return jax.lax.psum(x.astype(accum_dtype(x)), axis).astype(x.dtype)
