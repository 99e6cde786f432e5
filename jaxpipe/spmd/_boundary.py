"""Loss of a microbatch, and gradients of the boundary: the weights of embedding and head."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree, Scalar

from ..autodiff import StagedModel
from ..autodiff.backward import combine, floating
from ..autodiff.staged_model import Aux, accum_dtype
from ._buffers import to_accum_dtype
from .ranks import pvary, varying_axes


def loss_and_gradients(
    model: StagedModel, boundary: dict[str, PyTree], y: PyTree, batch_inputs: PyTree
) -> tuple[tuple[Scalar, Aux], tuple[dict[str, PyTree], PyTree]]:
    """Computes the loss of a microbatch together with its gradients, so logits are computed once.

    Returns:
        ((loss, metrics), (gradients of the groups of `boundary` that the loss reads, gradient of
        `y`)). The latter has the structure of `floating(y)`.
    """

    def loss(boundary, differentiated):
        return model.loss(boundary, combine(differentiated, y), batch_inputs)

    loss_and_grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    return loss_and_grads(model.boundary(boundary), floating(y))


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


def add_to_boundary(gradients: dict[str, PyTree], new: dict[str, PyTree]) -> dict[str, PyTree]:
    """Adds gradients of a microbatch to those of embedding and head, in float32.

    Returns:
        The sums, with the groups of `new` added.
    """
    sums = {name: gradients[name] for name in new}
    return gradients | jax.tree.map(jnp.add, sums, to_accum_dtype(new))
