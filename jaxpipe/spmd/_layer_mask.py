"""Padding layers: stages with different numbers of layers run the same program under a mask."""

from collections.abc import Callable

import jax
from jaxtyping import PyTree

from ._varying import cond, zeros


def if_present(layer: Callable) -> Callable:
    """Returns a layer that is the identity where its key says that it is padding.

    Args:
        layer: `(weights, x, batch_inputs, key) -> (x, aux)`.

    Returns:
        `(weights, x, batch_inputs, key) -> (x, aux)` with `key = {"present": a boolean, "dropout":
        key of the layer}`. A layer that is not present returns x, and zeros for aux.
    """

    def maybe(weights: PyTree, x: PyTree, batch_inputs: PyTree, key: dict[str, PyTree]):
        _, aux_shapes = jax.eval_shape(layer, weights, x, batch_inputs, key["dropout"])
        zero_aux = jax.tree.map(zeros, aux_shapes)
        return cond(
            key["present"],
            lambda: layer(weights, x, batch_inputs, key["dropout"]),
            lambda: (x, zero_aux),
            like=(x, zero_aux),
        )

    return maybe
