"""How a loss depends on what layers return besides x: by constant factors, or it is refused."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._dependence import dependent_inputs, pruned

Weights = dict[str, list[np.ndarray | None]]
"""For the loss and each metric what every extra of a layer is multiplied by, None for 0."""

_ADVICE = (
    "Layers run at other times than the loss, so it may only add what they return, times "
    "constants: such as their sum or mean over layers."
)


def weights_of_extras(
    parts: Callable, extras: Sequence[jax.ShapeDtypeStruct], others: tuple, axis: int
) -> Weights:
    """Finds the constants by which a loss and its metrics depend on extras of layers.

    `parts` is `(extras, *others) -> (scalars by name, whether the loss is a mean)`; `axis` is the
    dim of layers in extras.
    """
    is_mean = True

    def scalars(extras: list[Any], *others: Any) -> dict[str, Any]:
        nonlocal is_mean
        by_name, is_mean = parts(extras, *others)
        return by_name

    extras = list(extras)
    shapes = jax.eval_shape(scalars, extras, *others)
    sources, _ = dependent_inputs(scalars, extras, *others)
    weights: Weights = {}
    for name, (of_extras, *of_others) in zip(sorted(shapes), sources, strict=True):
        if not any(of_extras):
            continue
        if shapes[name].shape:
            raise ValueError(
                f"The metric {name!r} of `loss` is an array that depends on what layers return "
                "besides x. Return a scalar of it, or make what a row needs a part of x."
            )
        if name != "loss" and any(jax.tree.leaves(of_others)):
            raise ValueError(
                f"The metric {name!r} of `loss` depends on what layers return besides x and on "
                "more. Return what the layers make of it as a metric of its own."
            )
        if name == "loss" and not is_mean:
            raise ValueError(
                "`loss` returns a `Weighted`, and its total depends on what layers return "
                "besides x. Return a mean: what layers return is averaged over microbatches."
            )
        weights[name] = _factors(scalars, name, of_extras, extras, others, axis)
        if name != "loss":
            _check_sum(scalars, name, extras, others)
    return weights


def _check_sum(scalars: Callable, name: str, extras: list[Any], others: tuple[PyTree, ...]) -> None:
    """Raises a `ValueError` if a metric that depends on extras alone adds a constant to them."""

    def at_zero(*others: Any) -> Any:
        return scalars([jnp.zeros(s.shape, s.dtype) for s in extras], *others)[name]

    constant, _ = pruned(at_zero, *others)
    with jax.ensure_compile_time_eval():
        value = float(constant(*others))
    if value:
        raise ValueError(
            f"The metric {name!r} of `loss` is {value} if layers return zeros besides x. Return "
            "the sum of what they return, times constants, and add the constant outside."
        )


def _factors(
    scalars: Callable,
    name: str,
    used: list[bool],
    extras: list[Any],
    others: tuple[PyTree, ...],
    axis: int,
) -> list[np.ndarray | None]:
    """Returns the factors of every extra of a layer for one scalar."""
    ids = [i for i, is_used in enumerate(used) if is_used]
    if not all(jnp.issubdtype(extras[i].dtype, jnp.floating) for i in ids):
        raise ValueError(f"`loss` depends on integers that layers return. {_ADVICE}")

    def gradients(extras: list[Any], *others: Any) -> list[Any]:
        def scalar(read: list[Any]) -> Any:
            all_extras = list(extras)
            for i, value in zip(ids, read, strict=True):
                all_extras[i] = value
            return scalars(all_extras, *others)[name]

        return jax.grad(scalar)([extras[i] for i in ids])

    constant, reads = pruned(gradients, extras, *others)
    if any(jax.tree.leaves(reads)):
        raise ValueError(f"`loss` computes {name!r} from what layers return besides x. {_ADVICE}")
    with jax.ensure_compile_time_eval():
        values = [np.asarray(value) for value in constant(extras, *others)]
    factors: list[np.ndarray | None] = [None] * len(extras)
    for i, value in zip(ids, values, strict=True):
        first = np.take(value, [0], axis)
        if not np.array_equal(np.broadcast_to(first, value.shape), value):
            raise ValueError(
                f"`loss` weighs what layers return besides x by other factors for other layers, "
                f"in {name!r}. Layers of one pipeline run one program: let each multiply its own."
            )
        factors[i] = np.squeeze(first, axis)
    return factors
