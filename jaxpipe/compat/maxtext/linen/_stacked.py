"""Stacks the variables of all layers into [R, S, L, ...] leaves with the names of their dims.

Boxes, such as those of `nn.with_logical_partitioning`, stay around the stacked leaves. The names
"circular_repeats", "stage" and "layers" precede the layer's own names.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from flax.core import meta
from jax.sharding import PartitionSpec

from .._weight_sharding import STACKED


def init_stages(init: Callable) -> Callable:
    """Returns `init`, which takes one layer's keys by random stream, mapped over [S, L] keys."""

    def init_all(keys: dict[str, jax.Array], *arguments: Any) -> Any:
        init_layer = lambda keys: init(keys, *arguments)  # noqa: E731
        return jax.vmap(jax.vmap(init_layer))(keys)

    return init_all


def with_names(variables: Any) -> Any:
    """Adds the names of the three leading dims to the boxes around [R, S, L, ...] leaves."""
    for index, name in enumerate(STACKED):
        variables = meta.map_axis_meta(lambda box: _add_name(box, index, name), variables)  # noqa: B023
    return variables


def _add_name(box: Any, index: int, name: str) -> Any:
    # The names in a box of `nn.with_partitioning` are mesh axes, and only "stage" is one.
    is_physical = type(box) is nn.Partitioned and name != "stage"
    return box.add_axis(index, {nn.PARTITION_NAME: None if is_physical else name})


def logical_specs(variables: Any) -> Any:
    """Returns a logical spec for every leaf; without a box it names the three leading dims."""
    return jax.tree.map(_spec, variables, is_leaf=meta.is_axis_metadata)


def _spec(leaf: Any) -> PartitionSpec:
    if isinstance(leaf, meta.AxisMetadata) and hasattr(leaf, "get_partition_spec"):
        return leaf.get_partition_spec()  # type: ignore[attr-defined]
    return PartitionSpec(*STACKED)


def reshard_variables(variables: Any, reshard: Callable) -> Any:
    """Returns `variables` with each array replaced by `reshard(array, logical spec, path=name)`."""

    def reshard_leaf(path, leaf, names):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return jax.tree.map(lambda x: reshard(x, names, path=name), leaf)

    return jax.tree_util.tree_map_with_path(
        reshard_leaf, variables, logical_specs(variables), is_leaf=meta.is_axis_metadata
    )


def without_boxes(variables: Any) -> Any:
    """Returns the arrays; `meta.unbox` would constrain them by rules that may lack "stage"."""

    def value(leaf):
        return jax.tree.leaves(leaf)[0] if meta.is_axis_metadata(leaf) else leaf

    return jax.tree.map(value, variables, is_leaf=meta.is_axis_metadata)


def stack_repeats(init_all: Callable, dims: tuple[int, int, int]) -> Callable:
    """Returns `init_all`, of one repeat, for [R, S, L] keys and [R, S, L, ...] leaves."""

    def init(keys: dict[str, jax.Array], *arguments: Any) -> Any:
        assert all(key.size == math.prod(dims) for key in keys.values())
        return with_names(jax.vmap(lambda keys: init_all(keys, *arguments))(keys))

    return init
