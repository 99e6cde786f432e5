"""Raises an error where JAX would differentiate an engine that would then hang or be wrong."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _identity(x: Any, message: str) -> Any:
    return x


@_identity.defjvp
def _refuse(message: str, primals: Any, tangents: Any) -> Any:
    raise ValueError(message)


def undifferentiated(tree: PyTree, message: str) -> PyTree:
    """Returns arguments or results as they are; differentiating them raises a `ValueError`."""

    def guard(leaf: Any) -> Any:
        is_inexact = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)
        return _identity(leaf, message) if is_inexact else leaf

    return jax.tree.map(guard, tree)
