"""Initial weights, from the seed of a run.

Keys are folded from the number of a layer, so runs are equal in every layout.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, PyTree

from ... import models
from ..plan._weight_plan import WeightPlan


def init_boundary(weights: WeightPlan, seed: int) -> dict[str, Any]:
    """Initializes the weights of `embed` and `head`, with those of layers after the pipeline."""
    tree, key = weights.abstract_unstacked, jax.random.key(seed)
    boundary = models.initialize({name: tree[name] for name in ("embed", "head")}, key)
    if weights.num_layers_after:
        after, first = (weights.num_layers_after,), weights.layout.num_layers
        layers = models.initialize_layers(tree["layer"], key, after, first=first)
        boundary["head"]["layers"] = layers
    return boundary


def init_layers(
    weights: WeightPlan, seed: int, dims: Sequence[int], *, layer_ids: Sequence[int]
) -> PyTree[Array]:
    """Initializes weights [*dims, ...] of layers by their ids; those of padding, -1, are zeros."""
    layer = weights.abstract_unstacked["layer"]
    return models.initialize_layers(layer, jax.random.key(seed), dims, layer_ids=layer_ids)
