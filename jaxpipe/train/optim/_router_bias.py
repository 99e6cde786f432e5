"""Router biases, which steer the choice of experts and which no loss trains.

In place of a gradient they have the surplus of each expert's load. It is part of no norm of
gradients, and clipping, Adam and weight decay skip it: a bias makes a step of fixed length against
its sign. DeepSeek-AI, 2024, arXiv 2412.19437, section 2.1.2.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ...models.weights import is_weight


def drop_router_biases(tree: PyTree) -> PyTree:
    """Replaces every `router.bias` of a tree by None."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: None if _is_bias(path) else leaf, tree, is_leaf=is_weight
    )


def update_router_biases(trained: PyTree, weights: PyTree, gradients: PyTree, *, rate: float):
    """Updates router biases, and puts them in place of the None of `trained`."""

    def moved(new: Any, old: jax.Array, gradient: jax.Array) -> jax.Array:
        return old - jnp.asarray(rate, old.dtype) * jnp.sign(gradient) if new is None else new

    return jax.tree.map(moved, trained, weights, gradients, is_leaf=lambda x: x is None)


def _is_bias(path: Any) -> bool:
    return [getattr(entry, "key", None) for entry in path[-2:]] == ["router", "bias"]
