"""The mesh axes that a `PartitionSpec` names, what they divide, and arrays resharded by specs.

A spec names axes over which dims are split, and in its sets `unreduced` and `reduced` axes over
which an array is a sum that is still to be added up, or has been. JAX refuses to iterate over a
spec whose sets are not empty, so specs are read here through `partitions`.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree


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


def reshard(tree: Any, shardings: Any) -> Any:
    """Returns `tree` with every leaf split as `shardings` say, inside or outside `jax.jit`.

    Args:
        tree: A tree of arrays.
        shardings: A `NamedSharding` for every leaf.

    Returns:
        A tree like `tree`.

    Example:
        >>> from jaxpipe.sharding import make_mesh, named_shardings
        >>> x = jax.numpy.ones((8, 16))
        >>> mesh = make_mesh({}, devices=jax.devices()[:1])
        >>> tuple(reshard(x, named_shardings(x, ("embed", "mlp"), mesh)).sharding.spec)
        (('fsdp', 'context', 'expert'), 'tensor')
    """

    def reshard_leaf(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        mesh = sharding.mesh
        if AxisType.Explicit not in mesh.axis_types:
            return jax.lax.with_sharding_constraint(x, sharding)
        # The compiler decides how it is split over the automatic axes.
        spec = with_axis_type(sharding.spec, mesh, AxisType.Explicit)
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))

    return jax.tree.map(reshard_leaf, tree, shardings)


def reshard_to_spec(
    x: jax.Array, spec: PartitionSpec, mesh: Mesh | AbstractMesh | None
) -> jax.Array:
    """Returns `x` whose leading dims are split as `spec` says, inside or outside `jax.jit`."""
    if mesh is None or not len(spec):
        return x
    return reshard(x, NamedSharding(mesh, padded_spec(x, spec, mesh)))


def typed_by_specs(tree: Any, specs: Any, mesh: Mesh | None) -> Any:
    """Returns `tree` with its specs in its types, so that its cotangents have the same types."""
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return tree

    def of_subtree(spec: PartitionSpec, subtree: Any) -> Any:
        return jax.tree.map(lambda x: reshard_to_spec(jnp.asarray(x), spec, mesh), subtree)

    return jax.tree.map(of_subtree, specs, tree)


def padded_spec(x: jax.Array, spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns `spec` with entries for the dims of `x` that it does not reach.

    The added entries leave those dims split as they are.
    """
    if AxisType.Explicit in mesh.axis_types:
        rest = jax.typeof(x).sharding.spec.partitions[len(spec) :]
    else:
        rest = [PartitionSpec.UNCONSTRAINED] * (x.ndim - len(spec))
    return spec.update(partitions=(*spec.partitions, *rest))


def with_auto_axes(mesh: Mesh, f: Callable[..., PyTree], where: PyTree) -> Callable[..., PyTree]:
    """Returns `f` with all axes of a mesh automatic inside, whose results are sharded by `where`.

    If no axis of the mesh is explicit, that is `f` itself.
    """
    if AxisType.Explicit not in mesh.axis_types:
        return f
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    implicit = [axis for axis, kind in kinds if kind is not AxisType.Explicit]

    def explicit_only(sharding: NamedSharding) -> NamedSharding:
        return NamedSharding(mesh, without_axes(sharding.spec, implicit))

    return jax.sharding.auto_axes(f, out_sharding=jax.tree.map(explicit_only, where))
