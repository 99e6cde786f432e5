"""Initial weights and dropout keys, from the seeds of a run.

They are folded from the number of a layer, so runs are equal in every layout.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from ... import models
from ..plan._setup import StepPlan
from ..plan._weight_plan import WeightPlan


def init_boundary(weights: WeightPlan, seed: int) -> dict[str, Any]:
    """Initializes the weights of `embed` and `head`, with those of layers after the pipeline.

    Returns:
        The weights by `embed` and `head`.
    """
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
    """Initializes stacked weights of layers.

    Args:
        layer_ids: [product of dims] layers of the model in the order of the stack; -1 for padding.

    Returns:
        Weights of one layer with leaves [*dims, ...]; zeros for padding.
    """
    layer = weights.abstract_unstacked["layer"]
    return models.initialize_layers(layer, jax.random.key(seed), dims, layer_ids=layer_ids)


def layer_keys(plan: StepPlan, seed: int | None, step: Int[Array, ""] | int = 0) -> PyTree:
    """Returns what layers are given besides weights and inputs, as the engine stores it.

    Args:
        seed: The seed of the dropout keys of all steps; None without dropout.
    """
    layers = range(plan.pipeline.layout.num_layers)
    constants = plan.engine.stack(plan.pipeline, ())
    keys = _dropout_keys_of_layers(seed, step, layers)
    return plan.engine.layer_keys(plan.pipeline, keys, constants)


def _dropout_keys_of_layers(
    seed: int | None, step: Int[Array, ""] | int, layer_ids: Sequence[int]
) -> PyTree:
    """Folds the dropout keys of layers from a step.

    Args:
        layer_ids: [layers] layers of the model; -1 for padding.

    Returns:
        [layers] keys; () without dropout.
    """
    if seed is None:
        return ()
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.asarray(layer_ids))
