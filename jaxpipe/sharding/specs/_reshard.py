"""Reshards arrays by specs, and writes specs into the types of arrays on explicit axes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ._axes import with_axis_type, without_axes


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

    return jax.tree.map(of_subtree, specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))


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
