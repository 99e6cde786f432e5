"""Builds the `Gather` of a Flax module's weights from their specs and the names of their dims.

Flax's rules may have several entries for a name, and the first that fits an array applies. So names
are resolved separately for each weight, and the engine gets specs over mesh axes.
"""

from functools import partial
from itertools import zip_longest

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import PyTree

from ..sharding import GATHERED_AXES
from ..sharding.specs import axes_of, without_axes
from ..spmd.weight_gather import Gather, When, gather_by_specs, unsharded_specs
from ._weight_sharding import without_dims

EXPERTS = "exp"
"""Logical name of the dim of routed experts, which stays sharded over the mesh axis "expert"."""


def gather_of_names(
    weights: PyTree,
    names: PyTree,
    specs: PyTree,
    *,
    mesh: Mesh | None,
    when: When,
    batch_axes: tuple[str, ...] = (),
) -> Gather:
    """Returns the `Gather` that makes the weights of a stage whole over fsdp, context and expert.

    Args:
        weights: [R, S, L, ...] leaves.
        specs: Their physical specs. Dims beyond the end of a spec are not sharded.
        when: "tick", "once" or "repeat": whether weights are gathered in every tick, once per step,
            or once per repeat.

    Returns:
        The `Gather`.

    Raises:
        ValueError: If a weight stays sharded over one of `batch_axes`, or, where `batch_axes` are
            given, is sharded over another axis that is explicit.
    """
    if mesh is None:
        return Gather(when)
    if AxisType.Explicit in mesh.axis_types and not batch_axes:
        specs = without_dims(specs, 2)
        return gather_by_specs(specs, unsharded_specs(specs), when=when)
    stored = jax.tree.map(_stored_spec, weights, specs)
    unsharded = jax.tree.map(_unsharded_spec, weights, names, stored)
    if batch_axes:
        check = partial(_check_axes, mesh, batch_axes)
        jax.tree_util.tree_map_with_path(check, weights, stored, unsharded)
    return gather_by_specs(stored, unsharded, when=when, batch_axes=batch_axes)


def _stored_spec(w: jax.Array, spec: PartitionSpec) -> PartitionSpec:
    """Returns the spec of the weight of a stage, with an entry for every dim."""
    return PartitionSpec(*spec[2:], *[None] * (w.ndim - max(len(spec), 2)))


def _unsharded_spec(w: jax.Array, name: PartitionSpec, stored: PartitionSpec) -> PartitionSpec:
    """Returns the spec of the gathered weight of a stage. The dim of experts stays as it is."""
    del w
    dims = zip_longest(stored, without_axes(stored, GATHERED_AXES), name[2:])
    return PartitionSpec(*(axes if name == EXPERTS else rest for axes, rest, name in dims))


def _check_axes(
    mesh: Mesh,
    batch_axes: tuple[str, ...],
    path: tuple,
    w: jax.Array,
    stored: PartitionSpec,
    unsharded: PartitionSpec,
) -> None:
    """Checks that a weight can be gathered where devices have their own rows.

    Raises:
        ValueError: If the weight stays sharded over one of `batch_axes`, or is stored sharded over
            an explicit axis that is not one of them.
    """
    del w
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    remaining_axes = axes_of(unsharded).intersection(batch_axes)
    found = dict.fromkeys(remaining_axes, "one of `pipeline_batch_axes`")
    for axis in axes_of(stored).difference(batch_axes):
        if types[axis] == AxisType.Explicit:
            found[axis] = "which is Explicit and not one of `pipeline_batch_axes`"
    for axis, what in found.items():
        raise ValueError(
            f"The weight {jax.tree_util.keystr(path)} is split over {axis!r}, {what}. Devices with "
            f"their own rows need whole weights: choose among {', '.join(GATHERED_AXES)} and axes "
            "that split no weights, and leave the others of type Auto."
        )
