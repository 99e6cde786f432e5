"""Biases of routers, which steer the choice of experts and which no loss trains.

What stands in for their gradient is the surplus of each expert's load. It goes into no norm of
gradients, and clipping, Adam and weight decay do not see it: a bias makes a step of fixed length
against its sign. DeepSeek-AI, 2024, arXiv 2412.19437, section 2.1.2.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ... import models


def drop_router_biases(tree: PyTree) -> PyTree:
    """`tree`, of arrays or of `Weight`, with None in place of every `router.bias`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: None if _is_bias(path) else leaf, tree, is_leaf=models.is_weight
    )


def update_router_biases(trained: PyTree, weights: PyTree, gradients: PyTree, *, rate: float):
    """`trained`, with the biases of `weights`, moved, where it has None.

    Args:
        trained: New weights, as `drop_router_biases` leaves them.
        weights: The weights of the step.
        gradients: Their gradients.
        rate: How far a bias moves.
    """

    def moved(new: Any, old: jax.Array, gradient: jax.Array) -> jax.Array:
        return old - jnp.asarray(rate, old.dtype) * jnp.sign(gradient) if new is None else new

    return jax.tree.map(moved, trained, weights, gradients, is_leaf=lambda x: x is None)


def _is_bias(path: Any) -> bool:
    return [getattr(entry, "key", None) for entry in path[-2:]] == ["router", "bias"]
