"""Runs a function in which XLA divides arrays, inside of one whose axes are explicit in types."""

from collections.abc import Callable

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jaxtyping import PyTree

from ._axes import without_axes


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
