"""Says what shardings and shard maps of the mesh of all groups mean inside of one group."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..._input import clause
from ...sharding.specs import axes_of
from ._mesh import SUM_ONCE, MpmdMesh, check_reduced

_LOG = logging.getLogger("jaxpipe.mpmd")


def sharding_in_group(mesh: MpmdMesh, sharding: NamedSharding) -> NamedSharding:
    """Returns a sharding over the mesh of all groups as one over the mesh of one group.

    The axes of a group are automatic, even if the axes of `sharding` are explicit. A sharding of
    another mesh, and any sharding inside a `jax.shard_map`, is returned unchanged.
    """
    group, theirs = mesh.unstack[0].abstract_mesh, tuple(sharding.mesh.shape.items())
    if theirs not in (tuple(mesh.jax_mesh.shape.items()), tuple(group.shape.items())):
        return sharding
    if sharding.mesh.abstract_mesh == group or jax.sharding.get_abstract_mesh().manual_axes:
        return sharding
    check_reduced(sharding.spec, "A sharding inside `fun`")
    return sharding.update(mesh=group)


def constraints_in_group(
    mesh: MpmdMesh,
) -> Callable[[NamedSharding | P], NamedSharding | None]:
    """Returns a function from a sharding over explicit axes to the constraint that it means.

    The function returns None for a sharding of another mesh, and inside a `jax.shard_map`. It
    leaves out `reduced` and `unreduced` axes, which say where gradients are summed over devices and
    not what the sums are, and logs the first of them.
    """
    sizes = [tuple(m.shape.items()) for m in (mesh.jax_mesh, mesh.unstack[0])]
    warned: list[P] = []

    def constraint(sharding: NamedSharding | P) -> NamedSharding | None:
        context = jax.sharding.get_abstract_mesh()
        if isinstance(sharding, NamedSharding):
            if tuple(sharding.mesh.shape.items()) not in sizes:
                return None
            sharding = sharding.spec
        if context.manual_axes:
            return None
        delayed = sharding.reduced | sharding.unreduced
        if delayed and not warned:
            warned.append(sharding)
            _LOG.warning(
                "A sharding inside the step has the spec %s. Within a group gradients are summed "
                "over devices for every microbatch, not once a step: to sum them once, %s",
                *(sharding, SUM_ONCE.format(axis=min(delayed))),
            )
        return NamedSharding(context, P(*sharding.partitions))

    return constraint


def shard_map_in_group(
    mpmd_mesh: MpmdMesh,
    f: Callable,
    plain: Callable,
    *,
    mesh: Mesh,
    in_specs: PyTree,
    out_specs: PyTree,
    axis_names: Any,
    check_vma: bool,
) -> Callable:
    """Returns `jax.shard_map(f, mesh=mesh, ...)` over the other axes than that of the groups.

    `plain`, JAX's result, is returned if `mesh` is not the mesh of all groups. The axis of the
    groups is not manual inside, so that a collective over it is an error: otherwise it would
    silently be a sum over an axis of size 1.
    """
    theirs = tuple(mesh.shape.items())
    if mpmd_mesh.mpmd_dim == 1 or theirs != tuple(mpmd_mesh.jax_mesh.shape.items()):
        return plain
    axis = mpmd_mesh.mpmd_axis_name

    @wraps(f)
    def call(*arguments: Any) -> Any:
        if jax.sharding.get_abstract_mesh().manual_axes:
            return plain(*arguments)
        for name, specs in ("in_specs", in_specs), ("out_specs", out_specs):
            for spec in jax.tree.leaves(specs):
                if isinstance(spec, P) and axis in axes_of(spec):
                    raise ValueError(_over_groups(axis, f"`{name}` has {spec}"))
        names = frozenset(axis_names or mesh.axis_names) - {axis}
        inside = f
        if names:
            options = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": check_vma}
            inside = jax.shard_map(f, axis_names=set(names), **options)
        try:
            return inside(*arguments)
        except NameError as error:
            if f"unbound axis name: {axis}" not in str(error):
                raise
            raise ValueError(_over_groups(axis, clause(error).split(". To fix")[0])) from None

    return call


def _over_groups(axis: str, reason: str) -> str:
    return (
        f"A `jax.shard_map` inside a stage is over the axis {axis!r} of all groups: {reason}. "
        "Along this axis groups run programs of their own. Name other axes."
    )
