"""Losses of microbatches that add up to the loss of the batch.

A loss is a mean, or a pair (total, weight); with metrics or without. Engines add up what the
microbatches contribute: a mean divided by M, or a total divided by the weight of the whole batch,
which is computed before the pipeline begins.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree, Scalar

from ._dependence import dependent_inputs, restricted


class LossParts(NamedTuple):
    """What a loss function returned for one microbatch.

    Attributes:
        total: The loss, a scalar; or the sum that is to be divided by the weight of the batch.
        weight: The weight, a scalar, of the microbatch, or None if the loss is a mean.
        metrics: Scalars by name.
    """

    total: Any
    weight: Any
    metrics: dict[str, Scalar]


def loss_parts(returned: Any) -> LossParts:
    """Takes apart what a loss function returned.

    Args:
        returned: `loss` or `(loss, metrics)`, where the loss is a scalar or `(total, weight)`.

    Returns:
        The parts.

    Raises:
        ValueError: If it has another form, or a part is not a scalar.
    """
    metrics: dict[str, Scalar] = {}
    loss, weight = returned, None
    if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[1], dict):
        loss, metrics = loss
    if isinstance(loss, tuple) and len(loss) == 2:
        loss, weight = loss
    scalars = [loss, *([] if weight is None else [weight]), *metrics.values()]
    if not all(_is_scalar(x) for x in scalars):
        raise ValueError(
            f"`loss` returned {_described(returned)}. Return a scalar, the mean of the microbatch, "
            "or a pair of scalars (total, weight); with a dict of scalars as (loss, metrics)."
        )
    return LossParts(loss, weight, metrics)


def _is_scalar(x: Any) -> bool:
    return hasattr(jnp, "shape") and not isinstance(x, tuple | dict | list) and jnp.shape(x) == ()


def _described(tree: Any) -> str:
    def one(x: Any) -> str:
        aval = jax.typeof(x)
        return f"{aval.dtype}{list(aval.shape)}"

    return str(jax.tree.map(one, tree)).replace("'", "")


def batch_weight(
    loss: Callable[[PyTree, PyTree, PyTree], LossParts],
    boundary: PyTree,
    x: PyTree,
    batch_inputs: PyTree,
) -> Scalar | None:
    """Computes the weight of the whole batch, from the batch alone.

    Args:
        loss: `(boundary, x, inputs of a microbatch) -> LossParts`.
        boundary: The parameters that the loss reads, or their shapes.
        x: The shape and dtype of what leaves the last layer.
        batch_inputs: [M, ...] leaves.

    Returns:
        The sum of weights, or None if the loss is a mean.

    Raises:
        ValueError: If the weight depends on more than the batch.
    """
    shapes = _shapes_of_microbatch(batch_inputs)
    parts = jax.eval_shape(loss, boundary, x, shapes)
    if parts.weight is None:
        return None

    def weight(*arguments: PyTree) -> Any:
        return loss(*arguments).weight

    ((of_boundary, of_x, _),), _ = dependent_inputs(weight, boundary, x, shapes)
    if any(jax.tree.leaves((of_boundary, of_x))):
        raise ValueError(
            "The weight that `loss` returns depends on parameters or on the output of the layers. "
            "It must follow from the batch alone: the sum over all microbatches is needed before "
            "the first one has run."
        )
    compute = restricted(weight, [0], boundary, x, shapes)

    def one(inputs: PyTree) -> Any:
        return compute(boundary, x, inputs)[0]

    return jnp.sum(jax.lax.map(one, batch_inputs))


def _shapes_of_microbatch(batch_inputs: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batch_inputs)
