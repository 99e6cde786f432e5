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

from ...sharding import LogicalAxes

Initializer = Callable[[PRNGKeyArray, tuple[int, ...], Any], jax.Array]


@dataclass(frozen=True)
class Weight:
    """One abstract leaf of a model's weights.

    A tree of these describes a model. `jax.tree.map` treats each as a leaf.

    Attributes:
        shape: The shape of one layer's leaf, or of the whole leaf if it belongs to no layer.
        axes: One logical axis per dim.
        init: `(key, shape, dtype) -> array`, like the initializers of `jax.nn.initializers`.
        dtype: The dtype in which it is stored.
        exact: Whether the model computes with it in the dtype in which it is stored, as norms and
            routers do. Other leaves may be cast to the dtype of the computation beforehand.
        is_bias: Whether it is a bias or a sink, and so no matrix, whatever its shape: it does not
            decay, and muon leaves it to AdamW.

    Example:
        >>> Weight((4,), ("norm",), jax.nn.initializers.ones).exact
        False
    """

    shape: tuple[int, ...]
    axes: LogicalAxes
    init: Initializer
    dtype: Any = jnp.float32
    exact: bool = False
    is_bias: bool = False

    def __post_init__(self):
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)


def is_weight(x: Any) -> bool:
    return isinstance(x, Weight)


def scale(size: int, dtype: Any, offset: float = 0.0) -> Weight:
    """Returns the abstract weight of a norm: a number per channel, initialized to 1 - `offset`."""
    init = jax.nn.initializers.constant(1 - offset) if offset else jax.nn.initializers.ones
    return Weight((size,), ("norm",), init, dtype, exact=True)


def matrix(shape: tuple[int, ...], axes: LogicalAxes, fan_in: int, dtype: Any) -> Weight:
    """Returns an abstract matrix, initialized by a normal distribution cut at two deviations."""
    return Weight(shape, axes, jax.nn.initializers.truncated_normal(fan_in**-0.5), dtype)


def zero_bias(
    shape: tuple[int, ...], axes: LogicalAxes, dtype: Any, *, exact: bool = False
) -> Weight:
    """Returns an abstract bias, initialized to zeros."""
    return Weight(shape, axes, jax.nn.initializers.zeros, dtype, exact, is_bias=True)


def stack_weights(tree: PyTree, dims: Sequence[int], axes: LogicalAxes) -> PyTree:
    """Returns the abstract weights of many equal layers, stacked: [*dims, ...] leaves.

    Example:
        >>> layer = {"up": Weight((4, 8), ("embed", "mlp"), jax.nn.initializers.normal())}
        >>> stack_weights(layer, (6,), ("layers",))["up"].shape
        (6, 4, 8)
    """

    def stack(w: Weight) -> Weight:
        return replace(w, shape=(*dims, *w.shape), axes=(*axes, *w.axes))

    return jax.tree.map(stack, tree, is_leaf=is_weight)


def initialize(tree: PyTree, key: PRNGKeyArray) -> PyTree:
    """Returns arrays for a tree of `Weight`.

    The values of a leaf depend on `key` and on the path of the leaf, not on other leaves.

    Args:
        tree: A tree of `Weight`.
        key: Every leaf folds the CRC-32 of its path into it.

    Returns:
        A tree of arrays with the shapes and dtypes of the weights.

    Example:
        >>> tree = {"scale": Weight((4,), ("norm",), jax.nn.initializers.ones)}
        >>> initialize(tree, jax.random.key(0))["scale"].tolist()
        [1.0, 1.0, 1.0, 1.0]
    """

    def leaf(path, weight: Weight):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        path_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
        return weight.init(path_key, weight.shape, weight.dtype)

    return jax.tree_util.tree_map_with_path(leaf, tree, is_leaf=is_weight)


def initialize_layers(
    layer: PyTree,
    key: PRNGKeyArray,
    dims: Sequence[int],
    *,
    first: int = 0,
    layer_ids: Sequence[int] | None = None,
) -> PyTree:
    """Returns [*dims, ...] arrays for a stack of layers.

    A layer's values depend on its index in forward order, not on `dims`: the initial model is the
    same in every pipeline layout.

    Args:
        layer: A tree of `Weight` for one layer.
        key: Every layer folds its index into it, and then its leaves their paths.
        dims: The leading dims of the stack.
        first: The index, in the model, of the first layer of the stack.
        layer_ids: The indices of the layers of a stack in another order; -1 is a padding layer,
            which is initialized to zeros. The default is the order of the model, from `first` on.

    Returns:
        A tree of [*dims, ...] arrays.

    Example:
        >>> layer = {"scale": Weight((4,), ("norm",), jax.nn.initializers.ones)}
        >>> initialize_layers(layer, jax.random.key(0), (2, 3))["scale"].shape
        (2, 3, 4)
    """
    ids = np.asarray(range(first, first + math.prod(dims)) if layer_ids is None else layer_ids)
    keys = jax.vmap(lambda layer_id: jax.random.fold_in(key, layer_id))(ids)
    flat = jax.vmap(lambda k: initialize(layer, k))(keys)
    flat = jax.tree.map(lambda x: mask_padding_layers(x, ids), flat)
    return jax.tree.map(lambda x: x.reshape(*dims, *x.shape[1:]), flat)


def mask_padding_layers(x: jax.Array, layer_ids: np.ndarray) -> jax.Array:
    """Returns `x` [layers, ...] with zeros for padding layers, whose entry in `layer_ids` is -1."""
    is_layer = (layer_ids >= 0).reshape(-1, *[1] * (x.ndim - 1))
    return x if is_layer.all() else jnp.where(is_layer, x, 0)


def weight_shapes(tree: PyTree) -> PyTree:
    """Returns a `jax.ShapeDtypeStruct` for every leaf.

    Example:
        >>> weight_shapes({"scale": Weight((4,), ("norm",), jax.nn.initializers.ones)})
        {'scale': ShapeDtypeStruct(shape=(4,), dtype=float32)}
    """
    return jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), tree, is_leaf=is_weight)


def logical_axes(tree: PyTree) -> PyTree:
    """Returns the logical axes of every leaf.

    Args:
        tree: A tree of `Weight`.

    Returns:
        A tree of tuples, one logical axis per dim.

    Example:
        >>> logical_axes({"up": Weight((4, 8), ("embed", "mlp"), jax.nn.initializers.normal())})
        {'up': ('embed', 'mlp')}
    """
    return jax.tree.map(lambda w: w.axes, tree, is_leaf=is_weight)


def num_parameters(tree: PyTree) -> int:
    """Returns the number of parameters in all leaves together.

    Args:
        tree: A tree of `Weight`.

    Returns:
        The number.

    Example:
        >>> num_parameters({"up": Weight((4, 8), ("embed", "mlp"), jax.nn.initializers.normal())})
        32
    """
    return sum(math.prod(w.shape) for w in jax.tree.leaves(tree, is_leaf=is_weight))
