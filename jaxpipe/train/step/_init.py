"""What the seeds of a config give: the first weights, and dropout keys.

Every layer has its own by its number, so runs are equal in every layout.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from ... import models
from ..plan._setup import Setup


def init_boundary(setup: Setup) -> dict[str, Any]:
    """The weights of `embed` and `head`, among them those of layers after the pipeline."""
    tree, key = setup.abstract_unstacked_weights, _init_key(setup)
    ends = models.initialize({name: tree[name] for name in ("embed", "head")}, key)
    if setup.num_layers_after_pipeline:
        after, first = (setup.num_layers_after_pipeline,), setup.layout.num_layers
        layers = models.initialize_layers(tree["layer"], key, after, first=first)
        ends["head"]["layers"] = layers
    return ends


def init_layers(setup: Setup, dims: Sequence[int], *, layer_ids: Sequence[int]) -> PyTree[Array]:
    """[*dims, ...] weights of the layers with these numbers, -1 for none."""
    return models.initialize_layers(
        setup.abstract_unstacked_weights["layer"], _init_key(setup), dims, numbers=layer_ids
    )


def dropout_keys_of_layers(setup: Setup, step: Int[Array, ""], layer_ids: Sequence[int]) -> PyTree:
    """[layers] dropout keys of a step for the layers with these numbers, or () without dropout."""
    config = setup.config
    if not (config.enable_dropout and config.dropout_rate):
        return ()
    key = jax.random.fold_in(jax.random.key(config.dropout_seed), step)
    return jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.asarray(layer_ids))


def _init_key(setup: Setup) -> Array:
    return jax.random.key(setup.config.init_weights_seed)
