"""The mesh axes that a `PartitionSpec` names, and a spec without some of them.

A spec names axes over which dims are split, and in its sets `unreduced` and `reduced` axes over
which an array is a sum that is still to be added up, or has been. JAX refuses to iterate over a
spec whose sets are not empty, so specs are read here through `partitions`.
"""

from collections.abc import Collection
from typing import Any

from jax.sharding import PartitionSpec


def axes_of(spec: PartitionSpec) -> frozenset[str]:
    """Returns the mesh axes that a spec names: of its dims, `unreduced` and `reduced`."""
    split = (axis for dim in spec.partitions for axis in _axes_of_dim(dim))
    return spec.unreduced | spec.reduced | frozenset(split)


def without_axes(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """Returns a spec without some mesh axes.

    Args:
        spec: The spec. Dims that it leaves unconstrained stay so.
        axes: The axes. Dims that were split over these alone become unsplit, and the axes leave
            the sets `unreduced` and `reduced`.

    Returns:
        A spec of as many dims.
    """

    def rest(dim: Any) -> Any:
        if dim is PartitionSpec.UNCONSTRAINED:
            return dim
        return tuple(axis for axis in _axes_of_dim(dim) if axis not in axes) or None

    gone = frozenset(axes)
    return PartitionSpec(
        *map(rest, spec.partitions), unreduced=spec.unreduced - gone, reduced=spec.reduced - gone
    )


def _axes_of_dim(dim: Any) -> tuple[str, ...]:
    if dim is None or dim is PartitionSpec.UNCONSTRAINED:
        return ()
    return (dim,) if isinstance(dim, str) else tuple(dim)
