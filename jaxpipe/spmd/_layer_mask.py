"""Stages with different numbers of layers, in a program that is the same for all of them."""

from collections.abc import Callable

import jax
from jaxtyping import PyTree

from ._ranks import either, zeros


def if_present(layer: Callable) -> Callable:
    """A layer that does nothing where there is none.

    Args:
        layer: `(weights, x, side, key) -> (x, sums)`.

    Returns:
        The same with keys `{"present": a boolean, "dropout": key}`.
    """

    def maybe(weights: PyTree, x: PyTree, side: PyTree, key: dict[str, PyTree]):
        _, sums = jax.eval_shape(layer, weights, x, side, key["dropout"])
        nothing = jax.tree.map(zeros, sums)
        return either(
            key["present"],
            lambda: layer(weights, x, side, key["dropout"]),
            lambda: (x, nothing),
            like=(x, nothing),
        )

    return maybe
