"""The mesh axes that a `PartitionSpec` names, a spec without some of them, and what they divide.

A spec names axes over which dims are split, and in its sets `unreduced` and `reduced` axes over
which an array is a sum that is still to be added up, or has been. JAX refuses to iterate over a
spec whose sets are not empty, so specs are read here through `partitions`.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec


def axes_of(spec: PartitionSpec) -> frozenset[str]:
    """Returns the mesh axes that a spec names: of its dims, `unreduced` and `reduced`."""
    split = (axis for dim in spec.partitions for axis in axes_of_dim(dim))
    return spec.unreduced | spec.reduced | frozenset(split)


def without_axes(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """Returns a spec without some mesh axes: dims that these alone split become unsplit."""

    def rest(dim: Any) -> Any:
        if dim is PartitionSpec.UNCONSTRAINED:
            return dim
        return tuple(axis for axis in axes_of_dim(dim) if axis not in axes) or None

    gone = frozenset(axes)
    return PartitionSpec(
        *map(rest, spec.partitions), unreduced=spec.unreduced - gone, reduced=spec.reduced - gone
    )


def only_axes(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """Returns a spec without the mesh axes that are not among some."""
    return without_axes(spec, axes_of(spec).difference(axes))


def with_axis_type(
    spec: PartitionSpec, mesh: Mesh | AbstractMesh, axis_type: AxisType
) -> PartitionSpec:
    """Returns a spec with only those of its axes that have one type in a mesh."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return without_axes(spec, [axis for axis, kind in types if kind != axis_type])


def axes_of_dim(dim: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one dim of a spec, none for an unsplit or unconstrained one."""
    if dim is None or dim is PartitionSpec.UNCONSTRAINED:
        return ()
    return (dim,) if isinstance(dim, str) else tuple(dim)


def check_divisible(
    shape: Sequence[int], spec: PartitionSpec, sizes: Mapping[str, int], name: str
) -> None:
    """Checks that every dim of `shape` splits evenly over its mesh axes."""
    for dim, names in enumerate(spec):
        axes = axes_of_dim(names)
        parts = math.prod(sizes[axis] for axis in axes)
        if shape[dim] % parts:
            over = " x ".join(f"{axis} {sizes[axis]}" for axis in axes if sizes[axis] > 1)
            raise ValueError(
                f"`{name}` has {shape[dim]} in dim {dim} of {tuple(shape)}, which does not divide "
                f"over {over}. Change that size, the mesh, or the rule of that dim in "
                "`logical_axis_rules`."
            )
