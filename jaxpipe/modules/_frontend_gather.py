"""Builds the `Gather` of a Flax module's weights from the logical names of their dims.

Flax's rules may have several entries for a name, and the first that fits an array applies. So names
are resolved separately for each weight. The engine gets logical axes that encode mesh axes:
"fsdp+tensor" is a dim that is sharded over both.
"""

from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import PyTree

from ..sharding import Rules, partition_spec
from ..sharding._rules import GATHERED_AXES, gathered_rules
from ..sharding.specs import axes_of, axes_of_dim
from ..spmd.weight_gather import Gather, When, gather_by_specs, gather_weights
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
        names: Their logical specs.
        specs: Their physical specs. Dims beyond the end of a spec are not sharded.
        mesh: The mesh, or None.
        when: "tick", "once" or "repeat": whether weights are gathered in every tick, once per step,
            or once per repeat.
        batch_axes: Mesh axes that shard the rows and are manual in the pipeline.

    Returns:
        The `Gather`.

    Raises:
        ValueError: If a weight stays sharded over one of `batch_axes`, or, where `batch_axes` are
            given, is sharded over another axis that is explicit.
    """
    if mesh is None:
        return Gather(when)
    if AxisType.Explicit in mesh.axis_types and not batch_axes:
        return gather_by_specs(without_dims(specs, 2), when=when)
    rules: dict[str, tuple[str, ...]] = {}

    def logical(w: jax.Array, name: PartitionSpec, spec: PartitionSpec) -> tuple[str | None, ...]:
        dims = [_encode(*dim, rules) for dim in zip(name[2:], spec[2:], strict=True)]
        return (*dims, *[None] * (w.ndim - 2 - len(dims)))

    axes = jax.tree.map(logical, weights, names, specs)
    if batch_axes:
        check = partial(_check_axes, list(rules.items()), mesh, batch_axes)
        jax.tree_util.tree_map_with_path(check, axes, is_leaf=lambda x: isinstance(x, tuple))
    return gather_weights(axes, list(rules.items()), when=when, batch_axes=batch_axes)


def _check_axes(
    rules: Rules, mesh: Mesh, batch_axes: tuple[str, ...], path: tuple, dims: tuple
) -> None:
    """Checks that a weight can be gathered where devices have their own rows.

    Raises:
        ValueError: If the weight stays sharded over one of `batch_axes`, or is stored sharded over
            an explicit axis that is not one of them.
    """
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    gathered_spec = partition_spec(dims, gathered_rules(rules))
    remaining_axes, stored_axes = axes_of(gathered_spec), axes_of(partition_spec(dims, rules))
    found = dict.fromkeys(remaining_axes.intersection(batch_axes), "one of `pipeline_batch_axes`")
    for axis in stored_axes.difference(batch_axes):
        if types[axis] == AxisType.Explicit:
            found[axis] = "which is Explicit and not one of `pipeline_batch_axes`"
    for axis, what in found.items():
        raise ValueError(
            f"The weight {jax.tree_util.keystr(path)} is split over {axis!r}, {what}. Devices with "
            f"their own rows need whole weights: choose among {', '.join(GATHERED_AXES)} and axes "
            "that split no weights, and leave the others of type Auto."
        )


def _encode(name: Any, entry: Any, rules: dict[str, tuple[str, ...]]) -> str | None:
    axes = axes_of_dim(entry)
    if not axes:
        return None
    code = EXPERTS if name == EXPERTS else "+".join(axes)
    rules[code] = axes
    return code
