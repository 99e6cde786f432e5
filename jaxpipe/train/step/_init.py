"""Initial weights and dropout keys, from the seeds of a config.

They are folded from the number of a layer, so runs are equal in every layout.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from ... import models
from ..plan._setup import Setup


def init_boundary(setup: Setup) -> dict[str, Any]:
    """Initializes the weights of `embed` and `head`, with those of layers after the pipeline.

    Args:
        setup: The run.

    Returns:
        The weights by `embed` and `head`.
    """
    tree, key = setup.abstract_unstacked_weights, _init_key(setup)
    boundary = models.initialize({name: tree[name] for name in ("embed", "head")}, key)
    if setup.num_layers_after_pipeline:
        after, first = (setup.num_layers_after_pipeline,), setup.layout.num_layers
        layers = models.initialize_layers(tree["layer"], key, after, first=first)
        boundary["head"]["layers"] = layers
    return boundary


def init_layers(setup: Setup, dims: Sequence[int], *, layer_ids: Sequence[int]) -> PyTree[Array]:
    """Initializes stacked weights of layers.

    Args:
        setup: The run.
        dims: Leading dims of the stack.
        layer_ids: [product of dims] layers of the model in the order of the stack; -1 for padding.

    Returns:
        Weights of one layer with leaves [*dims, ...]; zeros for padding.
    """
    return models.initialize_layers(
        setup.abstract_unstacked_weights["layer"], _init_key(setup), dims, layer_ids=layer_ids
    )


def dropout_keys_of_layers(setup: Setup, step: Int[Array, ""], layer_ids: Sequence[int]) -> PyTree:
    """Folds the dropout keys of layers from a step.

    Args:
        setup: The run.
        step: Number of the step.
        layer_ids: [layers] layers of the model; -1 for padding.

    Returns:
        [layers] keys; () without dropout.
    """
    config = setup.config
    if not (config.enable_dropout and config.dropout_rate):
        return ()
    key = jax.random.fold_in(jax.random.key(config.dropout_seed), step)
    return jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.asarray(layer_ids))


def _init_key(setup: Setup) -> Array:
    return jax.random.key(setup.config.init_weights_seed)
