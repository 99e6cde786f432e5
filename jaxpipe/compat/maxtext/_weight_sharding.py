"""Shards and gathers the weights of a Flax module on a mesh by the logical names of their dims.

A stacked weight is [R, S, ...] with the names ("circular_repeats", "layers", ...), or [S, ...] with
one repeat. A logical spec is a `PartitionSpec` of names, a physical spec one of mesh axes. Dims
beyond the end of a spec keep their sharding. Flax's rules may have several entries for a name, and
the first that fits an array applies. So names are resolved separately for each weight, and the
engine gets specs over mesh axes.
"""

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import PyTree

from ...sharding import GATHERED_AXES
from ...sharding.specs import axes_of, check_divisible, padded_spec, reshard_to_spec, without_axes
from ...spmd.ranks import AXIS
from ...spmd.weight_gather import Gather, When, gather_by_specs, unsharded_specs
from ._settings import REPEATS, AxisRules


def physical_spec(
    names: PartitionSpec, rules: AxisRules, mesh_axes: Sequence[str]
) -> PartitionSpec:
    """Returns the mesh axes that each dim is sharded over.

    If a name has several rules, the first whose mesh axes no earlier dim uses applies. Axes that
    the mesh does not have are ignored. A name without a rule stands for the mesh axis of that name,
    if there is one; otherwise its dim is not sharded, as in Flax.
    """
    used: set[str] = set()

    def mesh_axes_of(name: Any) -> tuple[str, ...]:
        if isinstance(name, tuple):
            return tuple(axis for part in name for axis in mesh_axes_of(part))
        offers = [axes for of, axes in rules if of == name] or [(name,)]
        for offer in offers:
            axes = tuple(axis for axis in offer if axis in mesh_axes)
            if not used.intersection(axes):
                used.update(axes)
                return axes
        return ()

    return PartitionSpec(*map(mesh_axes_of, names))


def physical_specs(names: PyTree, rules: AxisRules, mesh: Mesh | None) -> PyTree:
    """Returns `physical_spec` of every leaf, or `PartitionSpec()` for every leaf without a mesh."""
    if mesh is None:
        return jax.tree.map(lambda _: PartitionSpec(), names)
    axes = axes_that_divide(mesh)
    return jax.tree.map(lambda spec: physical_spec(spec, rules, axes), names)


def axes_that_divide(mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes of a mesh, without those of size 1 if axes are explicit.

    As in MaxText: JAX tells the type of an array over such an axis from that of a whole one, and
    layers do not expect it.
    """
    if AxisType.Explicit not in mesh.axis_types:
        return mesh.axis_names
    return tuple(axis for axis in mesh.axis_names if axis == AXIS or mesh.shape[axis] > 1)


def rules_in_stage(rules: AxisRules | None) -> AxisRules | None:
    """Returns the rules without the mesh axis "stage", which is manual inside a stage."""
    if rules is None:
        return None
    return tuple((name, tuple(axis for axis in axes if axis != AXIS)) for name, axes in rules)


def without_repeats(names: PyTree) -> PyTree:
    """Returns every logical spec without the name "circular_repeats"."""

    def rest(spec):
        return PartitionSpec(*(name for name in spec if name != REPEATS))

    return jax.tree.map(rest, names)


def without_dims(specs: PyTree, count: int) -> PyTree:
    """Returns every physical spec without the entries of the first `count` dims."""
    return jax.tree.map(lambda spec: PartitionSpec(*spec[count:]), specs)


def reshard_weight(
    w: jax.Array, names: PartitionSpec, rules: AxisRules, mesh: Mesh | None, path: str
) -> jax.Array:
    """Returns `w` of all stages, sharded by the logical names of its dims; `path` is for errors."""
    if mesh is None:
        return w
    spec = physical_spec(names, rules, axes_that_divide(mesh))
    check_divisible(w.shape, spec, dict(mesh.shape), path)
    return reshard_to_spec(w, spec, mesh)


def shard_dim_by_stages(
    x: jax.Array,
    dim: int,
    spec: PartitionSpec | None,
    mesh: Mesh | None,
    *,
    is_weight: bool = False,
) -> jax.Array:
    """Returns `x` with dim `dim` sharded over the mesh axis `stage`, and the others by `spec`.

    A weight in use is gathered over fsdp, context and expert.
    """
    if mesh is None:
        return x
    spec = spec or PartitionSpec()
    entries = [*padded_spec(x, without_axes(spec, GATHERED_AXES) if is_weight else spec, mesh)]
    entries[dim] = AXIS
    return reshard_to_spec(x, PartitionSpec(*entries), mesh)


def reshard_microbatches(
    x: PyTree, rules: AxisRules, mesh: Mesh | None, batch_axes: tuple[str, ...] = ()
) -> PyTree:
    """Shards [M, rows, ...] leaves: M over the ranks, and the rows over the axes of the batch.

    Without `batch_axes`, the rule shards the rows, and a mesh with explicit axes leaves `x` as the
    caller has sharded it.
    """
    if mesh is None or (AxisType.Explicit in mesh.axis_types and not batch_axes):
        return x
    rule = physical_spec(PartitionSpec(AXIS, "activation_batch"), rules, mesh.axis_names)
    spec = PartitionSpec(AXIS, batch_axes) if batch_axes else rule

    def reshard_leaf(leaf):
        check_divisible(leaf.shape, spec, dict(mesh.shape), "inputs [microbatch, row, ...]")
        return reshard_to_spec(leaf, spec, mesh)

    return jax.tree.map(reshard_leaf, x)


def unshard_arrays(
    weights: PyTree,
    specs: PyTree,
    mesh: Mesh | None,
    axes: Sequence[str] = GATHERED_AXES,
    use_shardmap: bool = False,
) -> PyTree:
    """Returns whole arrays gathered over `axes`, by `lax.all_gather` or a sharding constraint."""
    if mesh is None:
        return weights
    unsharded = unsharded_specs(specs, axes)
    if not use_shardmap:
        return gather_by_specs(specs, unsharded, mesh=mesh).unshard(weights)
    gather = gather_by_specs(specs, unsharded, batch_axes=mesh.axis_names)
    # Gathered weights are equal on all devices of `axes`, which `check_vma` cannot infer.
    return jax.shard_map(
        gather.unshard, mesh=mesh, in_specs=(specs,), out_specs=unsharded, check_vma=False
    )(weights)


def describe_shardings(weights: PyTree, names: PyTree, specs: PyTree) -> str:
    """Returns one line per weight: path, dtype, shape, logical spec and physical spec."""

    def line(path, w, logical, physical):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return f"{name}  {w.dtype}{list(w.shape)}  {tuple(logical)} -> {tuple(physical)}"

    return "\n".join(jax.tree.leaves(jax.tree_util.tree_map_with_path(line, weights, names, specs)))


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
    """Returns the `Gather` that makes a stage's weights whole over fsdp, context and expert."""
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
    """Checks that a weight can be gathered where devices have their own rows."""
    del w
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    remaining_axes = axes_of(unsharded).intersection(batch_axes)
    reasons = dict.fromkeys(remaining_axes, "one of `pipeline_batch_axes`")
    for axis in axes_of(stored).difference(batch_axes):
        if types[axis] == AxisType.Explicit:
            reasons[axis] = "which is Explicit and not one of `pipeline_batch_axes`"
    for axis, reason in reasons.items():
        raise ValueError(
            f"The weight {jax.tree_util.keystr(path)} is split over {axis!r}, {reason}. Devices "
            f"with their own rows need whole weights: choose among {', '.join(GATHERED_AXES)} and "
            "axes that split no weights, and leave the others of type Auto."
        )
