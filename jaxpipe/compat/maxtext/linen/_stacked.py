"""Stacks the variables of all stages into [R, S, ...] leaves with the names of their dims.

With one repeat they are [S, ...]. Boxes, such as those of `nn.with_logical_partitioning`, stay
around the stacked leaves, and the names of `PipelineSettings.stacked` precede the stage's own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import linen as nn
from flax.core import meta
from jax.sharding import PartitionSpec

from ....spmd.ranks import AXIS
from .._settings import STAGES


def map_keys(init: Callable) -> Callable:
    """Returns `init`, which takes keys by random stream, for a leading dim of keys and results.

    It is a loop: a `vmap` would also run over the products of the stage, which not all allow
    (`jax.lax.ragged_dot`).
    """
    return lambda keys, *arguments: jax.lax.map(lambda keys: init(keys, *arguments), keys)


def with_names(variables: Any, names: Sequence[str]) -> Any:
    """Adds the names of the leading dims to the boxes around stacked leaves."""
    for index, name in enumerate(names):
        variables = meta.map_axis_meta(lambda box: _add_name(box, index, name), variables)  # noqa: B023
    return variables


def _add_name(box: Any, index: int, name: str) -> Any:
    if type(box) is nn.Partitioned:  # its names, those of `nn.with_partitioning`, are mesh axes
        return box.add_axis(index, {nn.PARTITION_NAME: AXIS if name == STAGES else None})
    return box.add_axis(index, {nn.PARTITION_NAME: name})


def logical_specs(variables: Any, names: Sequence[str]) -> Any:
    """Returns a logical spec for every leaf; without a box it is `names`, of the leading dims."""

    def spec(leaf):
        if isinstance(leaf, meta.AxisMetadata) and hasattr(leaf, "get_partition_spec"):
            return leaf.get_partition_spec()  # type: ignore[attr-defined]
        return PartitionSpec(*names)

    return jax.tree.map(spec, variables, is_leaf=meta.is_axis_metadata)


def reshard_variables(variables: Any, names: Sequence[str], reshard: Callable) -> Any:
    """Returns `variables` with each array replaced by `reshard(array, logical spec, path=name)`."""

    def reshard_leaf(path, leaf, spec):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return jax.tree.map(lambda x: reshard(x, spec, path=name), leaf)

    return jax.tree_util.tree_map_with_path(
        reshard_leaf, variables, logical_specs(variables, names), is_leaf=meta.is_axis_metadata
    )


def without_boxes(variables: Any) -> Any:
    """Returns the arrays; `meta.unbox` would constrain them by rules that may lack "stage"."""

    def value(leaf):
        return jax.tree.leaves(leaf)[0] if meta.is_axis_metadata(leaf) else leaf

    return jax.tree.map(value, variables, is_leaf=meta.is_axis_metadata)
