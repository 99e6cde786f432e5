"""The sizes of a run's model, from the keys that its family reads."""

import dataclasses

import jax.numpy as jnp

from ... import models
from ...models import MODEL_FAMILIES, ModelConfig
from ..config._config import Config, changed_keys

_OF_YARN = {
    *("rope_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale")
}
"""Keys that a family reads with `rope_type=yarn` alone."""


def model_config(config: Config) -> ModelConfig:
    """Returns the sizes of the config's model."""
    family = MODEL_FAMILIES[config.decoder_block]
    others = set().union(*(other.keys for other in MODEL_FAMILIES.values())) - family.keys
    for name, value, default in changed_keys(config, sorted(others)):
        raise ValueError(
            f"`{name}` is {value!r} and `decoder_block` is {config.decoder_block!r}, which "
            f"has no such thing. Leave it at {default!r}."
        )
    for name, value in family.fixed.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"`{name}` is {getattr(config, name)!r} and `decoder_block` is "
                f"{config.decoder_block!r}, where it is {value!r} in every model. Give "
                f"`{name}={str(value).lower()}`, or another `decoder_block`."
            )
    unread = set() if config.rope_type == "yarn" else _OF_YARN & family.keys
    for name, value, default in changed_keys(config, sorted(unread)):
        raise ValueError(
            f"`{name}` is {value!r} and `rope_type` is {config.rope_type!r}, so nothing reads it. "
            f"Leave it at {default!r}, or give `rope_type=yarn`."
        )
    fields = dataclasses.fields(family.sizes)  # pyright: ignore[reportArgumentType]
    return family.sizes(**{field.name: getattr(config, field.name) for field in fields})


def layer_bytes(config: Config) -> int:
    """Returns the bytes of the weights of one layer of the pipeline in the dtype of computation."""
    dtype = jnp.dtype(config.dtype)
    weights = MODEL_FAMILIES[config.decoder_block].weights(model_config(config), dtype)
    return models.num_parameters(weights["layer"]) * dtype.itemsize
