"""The variables of all layers in one tree: [R, S, L, ...] leaves, and the names of their dims.

Boxes, such as those of `nn.with_logical_partitioning`, stay around the stacked leaves, with the
names "circular_repeats", "stage" and "layers" in front of the layer's own.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from flax.core import meta
from jax.sharding import PartitionSpec

from .. import modules


def init_stages(init: Callable) -> Callable:
    """`init`, of one layer's keys, for all layers of a repeat.

    Returns:
        A function of [S, L] keys, by stream, and of the arguments of a layer's call, which gives
        variables with [S, L, ...] leaves.
    """

    def init_all(keys: dict[str, jax.Array], *arguments: Any) -> Any:
        of_layer = lambda keys: init(keys, *arguments)  # noqa: E731
        return jax.vmap(jax.vmap(of_layer))(keys)

    return init_all


def with_names(variables: Any) -> Any:
    """Boxes around [R, S, L, ...] leaves learn the names of the three dims in front."""
    for index, name in enumerate(modules.STACKED):
        variables = meta.map_axis_meta(lambda box: _add_name(box, index, name), variables)  # noqa: B023
    return variables


def _add_name(box: Any, index: int, name: str) -> Any:
    # The names in a box of `nn.with_partitioning` are mesh axes, and only "stage" is one.
    is_physical = type(box) is nn.Partitioned and name != "stage"
    return box.add_axis(index, {nn.PARTITION_NAME: None if is_physical else name})


def logical_specs(variables: Any) -> Any:
    """A `PartitionSpec` of names for every leaf; without a box those of the dims in front."""
    return jax.tree.map(_spec, variables, is_leaf=meta.is_axis_metadata)


def _spec(leaf: Any) -> PartitionSpec:
    if isinstance(leaf, meta.AxisMetadata) and hasattr(leaf, "get_partition_spec"):
        return leaf.get_partition_spec()  # type: ignore[attr-defined]
    return PartitionSpec(*modules.STACKED)


def placed(variables: Any, place: Callable) -> Any:
    """`variables`, each array through `place(array, logical spec, path=name)`."""

    def place_leaf(path, leaf, names):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return jax.tree.map(lambda x: place(x, names, path=name), leaf)

    return jax.tree_util.tree_map_with_path(
        place_leaf, variables, logical_specs(variables), is_leaf=meta.is_axis_metadata
    )


def without_boxes(variables: Any) -> Any:
    """The arrays. (`meta.unbox` would constrain them by rules that may not know "stage".)"""

    def value(leaf):
        return jax.tree.leaves(leaf)[0] if meta.is_axis_metadata(leaf) else leaf

    return jax.tree.map(value, variables, is_leaf=meta.is_axis_metadata)


def stack_repeats(init_all: Callable, dims: tuple[int, int, int]) -> Callable:
    """`init_all` of one repeat for all of them: [R, S, L] keys to [R, S, L, ...] leaves."""

    def init(keys: dict[str, jax.Array], *arguments: Any) -> Any:
        assert all(key.size == math.prod(dims) for key in keys.values())
        return with_names(jax.vmap(lambda keys: init_all(keys, *arguments))(keys))

    return init
