"""Checks dropout keys: masks must be the same in every engine and on every mesh."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

_MESH_DEPENDENT = ("key<rbg>", "key<urbg>")
"""Keys whose draws XLA makes whole: under `vmap`, or on another sharding, they are others."""


def check_key(key: Any) -> Array:
    """Checks the dropout key of a step."""
    if key is None:
        raise ValueError(
            "A function of the model takes a dropout key, and `key` is None. Give the key "
            "of the step, such as `jax.random.fold_in(jax.random.key(0), step)`."
        )
    dtype = getattr(key, "dtype", type(key).__name__)
    if isinstance(dtype, str) or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        shape = list(jnp.shape(key)) if hasattr(key, "shape") else ""
        raise ValueError(
            f"`key` is {dtype}{shape}. Give a typed key: `jax.random.key(seed)` in place of "
            "`jax.random.PRNGKey(seed)`, or `jax.random.wrap_key_data(key)`."
        )
    if key.shape:
        raise ValueError(
            f"`key` has shape {key.shape}. Give one key, of which the pipeline makes one for each "
            "function, layer and microbatch."
        )
    if str(dtype) in _MESH_DEPENDENT:
        raise ValueError(
            f"`key` is {dtype}. What it draws depends on the mesh and repeats under `vmap`, so no "
            "two engines would drop the same. Give `jax.random.key(seed, impl='threefry2x32')`, "
            "which `jax_default_prng_impl` makes the default."
        )
    return key
