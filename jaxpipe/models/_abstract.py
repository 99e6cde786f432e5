"""Abstract weights: shape, logical axes and initializer of every leaf, before any array exists."""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from ..sharding import LogicalAxes

Initializer = Callable[[PRNGKeyArray, tuple[int, ...], Any], jax.Array]


@dataclass(frozen=True)
class Weight:
    """One leaf. A tree of these describes a model; `jax.tree.map` treats it as a leaf.

    Attributes:
        shape: The shape of one layer's leaf, or of the leaf if it is in no layer.
        axes: One logical axis per dim.
        init: `(key, shape, dtype) -> array`, as in `jax.nn.initializers`.
        dtype: What it is stored in.
        exact: Whether the model computes with it as it is stored: norms and routers do. The others
            may be cast to the dtype of the computation beforehand.
    """

    shape: tuple[int, ...]
    axes: LogicalAxes
    init: Initializer
    dtype: Any = jnp.float32
    exact: bool = False

    def __post_init__(self):
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)


def is_weight(x: Any) -> bool:
    return isinstance(x, Weight)


def scale(size: int, dtype: Any) -> Weight:
    """A norm's factor per channel, 1 at first."""
    return Weight((size,), ("norm",), jax.nn.initializers.ones, dtype, exact=True)


def matrix(shape: tuple[int, ...], axes: LogicalAxes, fan_in: int, dtype: Any) -> Weight:
    """A matrix whose entries start with variance `1 / fan_in`, cut off at two deviations."""
    return Weight(shape, axes, jax.nn.initializers.truncated_normal(fan_in**-0.5), dtype)


def read_dtypes(tree: PyTree, dtype: Any) -> PyTree:
    """What each weight may be cast to before a model that computes in `dtype` reads it."""
    return jax.tree.map(lambda w: jnp.dtype(w.dtype if w.exact else dtype), tree, is_leaf=is_weight)


def stacked(tree: PyTree, dims: Sequence[int], axes: LogicalAxes) -> PyTree:
    """The tree of many equal layers: `dims`, with logical axes `axes`, in front of every leaf."""

    def stack(w: Weight) -> Weight:
        return replace(w, shape=(*dims, *w.shape), axes=(*axes, *w.axes))

    return jax.tree.map(stack, tree, is_leaf=is_weight)


def initialize(tree: PyTree, key: PRNGKeyArray) -> PyTree:
    """Arrays for a tree of `Weight`. A leaf's values depend on its path, not on its neighbours."""

    def leaf(path, weight: Weight):
        return weight.init(_path_key(key, path), weight.shape, weight.dtype)

    return jax.tree_util.tree_map_with_path(leaf, tree, is_leaf=is_weight)


def initialize_layers(
    layer: PyTree,
    key: PRNGKeyArray,
    dims: Sequence[int],
    *,
    first: int = 0,
    numbers: Sequence[int] | None = None,
) -> PyTree:
    """[*dims, ...] arrays for a stack of layers, the first of which is number `first` of the model.

    A layer's values depend on its number in forward order, not on `dims`: a model starts equal in
    every pipeline layout. `numbers` are those of a stack that is in another order; -1 is a place
    without a layer, and gets zeros.
    """
    of_model = np.asarray(range(first, first + math.prod(dims)) if numbers is None else numbers)
    keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(of_model)
    flat = jax.vmap(lambda k: initialize(layer, k))(keys)
    flat = jax.tree.map(lambda x: where_present(x, of_model), flat)
    return jax.tree.map(lambda x: x.reshape(*dims, *x.shape[1:]), flat)


def where_present(x: jax.Array, numbers: np.ndarray) -> jax.Array:
    """[places, ...] with zeros where the number of the layer is -1."""
    present = (numbers >= 0).reshape(-1, *[1] * (x.ndim - 1))
    return x if present.all() else jnp.where(present, x, 0)


def shapes(tree: PyTree) -> PyTree:
    """`jax.ShapeDtypeStruct` for every leaf."""
    return jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), tree, is_leaf=is_weight)


def logical_axes(tree: PyTree) -> PyTree:
    """The logical axes of every leaf."""
    return jax.tree.map(lambda w: w.axes, tree, is_leaf=is_weight)


def num_parameters(tree: PyTree) -> int:
    """Numbers in all leaves together."""
    return sum(math.prod(w.shape) for w in jax.tree.leaves(tree, is_leaf=is_weight))


def _path_key(key: PRNGKeyArray, path: Any) -> PRNGKeyArray:
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return jax.random.fold_in(key, zlib.crc32(name.encode()))
