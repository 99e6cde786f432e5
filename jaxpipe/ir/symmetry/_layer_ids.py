"""Reads and masks arrays [lead, ...] of layers, where integers [lead] say which layer is where."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LayerIds = Mapping[str, tuple[np.ndarray, ...]]
"""For every kind of layers and part [lead] the layer at each position, -1 for padding."""


def fill_padding(part: Any, ids: np.ndarray, value: Any = 0) -> Any:
    """Returns a part [lead, ...] with `value` at padding; keys there are left as they are."""
    if (ids >= 0).all() or jnp.issubdtype(part.dtype, jax.dtypes.extended):
        return part
    is_layer = (ids >= 0).reshape(*ids.shape, *(1,) * (part.ndim - ids.ndim))
    return jnp.where(is_layer, part, jnp.asarray(value, part.dtype))


def read_layer(parts: Sequence[Any], all_ids: Sequence[np.ndarray], layer: int) -> Any:
    """Returns the array of one layer out of the parts [lead, ...] of its kind."""
    for part, ids in zip(parts, all_ids, strict=True):
        for index in np.argwhere(ids == layer):
            return part[tuple(map(int, index))]
    raise AssertionError(f"layer {layer} is nowhere")
