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


def first_ends(setup: Setup) -> dict[str, Any]:
    """The weights of `embed` and `head`, among them those of layers after the pipeline."""
    tree, key = setup.layer_tree, _key(setup)
    ends = models.initialize({name: tree[name] for name in ("embed", "head")}, key)
    if setup.layers_after:
        after, first = (setup.layers_after,), setup.layout.num_layers
        layers = models.initialize_layers(tree["layer"], key, after, first=first)
        ends["head"]["layers"] = layers
    return ends


def first_layers(setup: Setup, dims: Sequence[int], *, numbers: Sequence[int]) -> PyTree[Array]:
    """[*dims, ...] weights of the layers with these numbers, -1 for none."""
    return models.initialize_layers(setup.layer_tree["layer"], _key(setup), dims, numbers=numbers)


def layer_keys(setup: Setup, step: Int[Array, ""], numbers: Sequence[int]) -> PyTree:
    """[layers] dropout keys of a step for the layers with these numbers, or () without dropout."""
    config = setup.config
    if not (config.enable_dropout and config.dropout_rate):
        return ()
    key = jax.random.fold_in(jax.random.key(config.dropout_seed), step)
    return jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.asarray(numbers))


def _key(setup: Setup) -> Array:
    return jax.random.key(setup.config.init_weights_seed)
