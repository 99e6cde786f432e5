"""Losses of microbatches that add up to the loss of the batch.

A loss is a mean, or `Weighted(total, weight)`; with metrics or without. Engines add up what the
microbatches contribute: a mean divided by M, or a total divided by the weight of the whole batch,
which is computed before the pipeline begins.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree, Scalar

from ..autodiff.staged_model import accum_dtype
from ._dependence import dependent_inputs, pruned
from ._pieces import shape_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weighted:
    """A loss that is a weighted mean, such as one over tokens that a mask selects; a pytree.

    The loss of a batch is the sum of all totals divided by the sum of all weights, in whatever
    microbatches it is cut.

    Attributes:
        total: A scalar, the sum of weighted losses, such as `jnp.sum(losses * mask)`.
        weight: A scalar, the sum of weights, such as `jnp.sum(mask)`. It follows from the batch
            alone.

    Example:
        >>> losses, mask = jnp.array([1.0, 2.0, 3.0]), jnp.array([1.0, 1.0, 0.0])
        >>> float(Weighted(jnp.sum(losses * mask), jnp.sum(mask)).mean)
        1.5
    """

    total: Any
    weight: Any

    @property
    def mean(self) -> Any:
        """Returns the total divided by the weight."""
        return self.total / self.weight


class LossParts(NamedTuple):
    """What a loss function returned for one microbatch.

    Attributes:
        total: The loss, a scalar; or the sum that is to be divided by the weight of the batch.
        weight: The weight, a scalar, of the microbatch, or None if the loss is a mean.
        metrics: Scalars by name, and arrays [rows, ...].
    """

    total: Any
    weight: Any
    metrics: dict[str, Any]


_FORMS = (
    "Return a scalar, the mean over the rows of the microbatch, or `jp.Weighted(total, weight)`; "
    "with metrics as `(loss, {name: a scalar or an array [rows, ...]})`."
)


def loss_parts(returned: Any) -> LossParts:
    """Takes apart what a loss function returned."""
    loss, metrics = returned, {}
    if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[1], dict):
        loss, metrics = loss
    if isinstance(loss, tuple) and len(loss) == 2 and all(map(_is_scalar, loss)):
        raise ValueError(
            f"`loss` returned {_described(loss)}, a pair of numbers, which may mean two things. "
            "Return `jp.Weighted(total, weight)` if the loss of the batch is the sum of the first "
            "divided by the sum of the second; or `(loss, {'num_tokens': num_tokens})` if the "
            "first is the mean over rows and the second is a metric."
        )
    parts = (loss.total, loss.weight) if isinstance(loss, Weighted) else (loss,)
    if not all(map(_is_scalar, parts)):
        raise ValueError(f"`loss` returned {_described(returned)}. {_FORMS}")
    for part in parts:
        if jnp.issubdtype(jnp.result_type(part), jnp.complexfloating):
            raise ValueError(
                f"`loss` returned {_described(returned)}. A loss is real, as gradients are of real "
                "numbers: return `jnp.real(loss)` or `jnp.abs(loss)`."
            )
    check_metrics(metrics, "loss", may_have_rows=True)
    return LossParts(parts[0], parts[1] if len(parts) == 2 else None, metrics)


def check_metrics(metrics: dict[str, Any], function: str, *, may_have_rows: bool = False) -> None:
    """Checks that metrics are scalars, or arrays [b, ...] if a function may return those."""
    for name, value in metrics.items():
        if isinstance(value, dict):
            flat = ", ".join(f"'{name}/{key}': ..." for key in list(value)[:3])
            raise ValueError(
                f"`{function}` returned a dict as the metric {name!r}. Metrics are scalars by "
                f"name: return {{{flat}}} in its place."
            )
        if not (_is_number(value) if may_have_rows else _is_scalar(value)):
            raise ValueError(
                f"`{function}` returned {_described(value)} as the metric {name!r}. Metrics are "
                "scalars by name: return one number for a microbatch, such as `jnp.mean(value)`."
            )


def check_has_rows(metrics: dict[str, Any], num_rows: int) -> None:
    """Checks that arrays among metrics of the loss have an entry for each row of a microbatch."""
    for name, value in metrics.items():
        if jnp.ndim(value) and jnp.shape(value)[0] != num_rows:
            raise ValueError(
                f"`loss` returned {_described(value)} as the metric {name!r}, of a microbatch of "
                f"{num_rows} rows. A metric is one number for the microbatch, such as "
                f"`jnp.mean(value)`, or an array [{num_rows}, ...] with an entry for each row."
            )


def _is_scalar(x: Any) -> bool:
    return _is_number(x) and jnp.shape(x) == ()


def _is_number(x: Any) -> bool:
    """Returns whether x is a number or an array of numbers, of any shape."""
    if isinstance(x, Weighted | tuple | list | dict) or x is None:
        return False
    return not jnp.issubdtype(getattr(x, "dtype", jnp.float32), jax.dtypes.extended)


def _described(tree: Any) -> str:
    def one(x: Any) -> str:
        aval = jax.typeof(x)
        return f"{aval.dtype}{list(aval.shape)}"

    return str(jax.tree.map(one, tree)).replace("'", "")


def batch_divisor(
    loss: Callable[[PyTree, PyTree, PyTree], LossParts],
    boundary: PyTree,
    x: PyTree,
    batch_inputs: PyTree,
) -> Scalar:
    """Returns the divisor of the sum of losses of microbatches, from the batch alone.

    It is the sum of weights, or M if the loss is a mean; its dtype is the loss's, at least float32.
    """
    shapes = jax.tree.map(partial(shape_of, skipped=1), batch_inputs)
    parts = jax.eval_shape(loss, boundary, x, shapes)
    dtype = accum_dtype(parts.total)
    if parts.weight is None:
        return jnp.asarray(jax.tree.leaves(batch_inputs)[0].shape[0], dtype)

    def weight(*arguments: PyTree) -> Any:
        return loss(*arguments).weight

    ((of_boundary, of_x, _),), _ = dependent_inputs(weight, boundary, x, shapes)
    if any(jax.tree.leaves((of_boundary, of_x))):
        raise ValueError(
            "The weight that `loss` returns depends on parameters or on the output of the layers. "
            "It must follow from the batch alone: the sum over all microbatches is needed before "
            "the first one has run."
        )
    compute, _ = pruned(weight, boundary, x, shapes)

    def one(inputs: PyTree) -> Any:
        value = jnp.asarray(compute(boundary, x, inputs))
        return value if jnp.issubdtype(value.dtype, jnp.integer) else value.astype(dtype)

    return jnp.sum(jax.lax.map(one, batch_inputs)).astype(dtype)
