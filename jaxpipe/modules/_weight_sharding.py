"""Shards and gathers the weights of a Flax module on a mesh by the logical names of their dims.

A stacked weight is [R, S, L, ...] with the names ("circular_repeats", "stage", "layers", ...). A
logical spec is a `PartitionSpec` of names, a physical spec one of mesh axes. Dims beyond the end of
a spec keep their sharding.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec
from jaxtyping import PyTree

from ..sharding.specs import (
    check_divisible,
    padded_spec,
    reshard_to_spec,
    with_axis_type,
    without_axes,
)
from ..spmd.ranks import AXIS, is_spec, on_ranks
from ._settings import AxisRules

STACKED = ("circular_repeats", "stage", "layers")
GATHERED = ("fsdp", "fsdp_transpose", "context", "expert")
"""Mesh axes that weights are sharded over to save memory, and gathered over before use."""


def physical_spec(
    names: PartitionSpec, rules: AxisRules, mesh_axes: Sequence[str]
) -> PartitionSpec:
    """Returns the mesh axes that each dim is sharded over.

    Args:
        names: A logical spec.
        rules: Logical axis rules. If a name has several rules, the first whose mesh axes no earlier
            dim uses applies. Axes that the mesh does not have are ignored.
        mesh_axes: The axes of the mesh. A name without a rule stands for the mesh axis of that
            name, if the mesh has one. Otherwise its dim is not sharded, as in Flax.

    Returns:
        The physical spec.
    """
    used: set[str] = set()

    def axes_of(name: Any) -> tuple[str, ...]:
        if isinstance(name, tuple):
            return tuple(axis for part in name for axis in axes_of(part))
        offers = [axes for of, axes in rules if of == name] or [(name,)]
        for offer in offers:
            axes = tuple(axis for axis in offer if axis in mesh_axes)
            if not used.intersection(axes):
                used.update(axes)
                return axes
        return ()

    return PartitionSpec(*(_entry(axes_of(name)) for name in names))


def physical_specs(names: PyTree, rules: AxisRules, mesh: Mesh | None) -> PyTree:
    """Returns `physical_spec` of every leaf, or `PartitionSpec()` for every leaf without a mesh."""
    if mesh is None:
        return jax.tree.map(lambda _: PartitionSpec(), names, is_leaf=is_spec)
    axes = mesh.axis_names
    return jax.tree.map(lambda spec: physical_spec(spec, rules, axes), names, is_leaf=is_spec)


def rules_in_stage(rules: AxisRules | None) -> AxisRules | None:
    """Returns the rules without the mesh axis "stage", which is manual inside a stage."""
    if rules is None:
        return None
    return tuple((name, tuple(axis for axis in axes if axis != AXIS)) for name, axes in rules)


def without_repeats(names: PyTree) -> PyTree:
    """Returns every logical spec without the name "circular_repeats"."""

    def rest(spec):
        return PartitionSpec(*(name for name in spec if name != STACKED[0]))

    return jax.tree.map(rest, names, is_leaf=is_spec)


def reshard_weight(
    w: jax.Array, names: PartitionSpec, rules: AxisRules, mesh: Mesh | None, path: str
) -> jax.Array:
    """Returns `w`, sharded over `mesh` by the logical names of its dims.

    Args:
        w: The weight.
        names: Its logical spec.
        rules: Logical axis rules.
        mesh: The mesh. If it is None, `w` is returned as it is.
        path: The path of the weight, for errors.

    Returns:
        The sharded weight.

    Raises:
        ValueError: If the size of a dim is not a multiple of its number of shards. It names `path`.
    """
    if mesh is None:
        return w
    spec = physical_spec(names, rules, mesh.axis_names)
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
    """Returns `x` with dim `dim` sharded over the mesh axis `stage`.

    Args:
        x: An array.
        dim: The dim with one entry per rank.
        spec: The physical spec of `x`, whose other dims are sharded by it. Dims beyond its end keep
            their sharding.
        mesh: The mesh. If it is None, `x` is returned as it is.
        is_weight: Whether `x` is a weight in use. Then it is gathered over fsdp, context and
            expert.

    Returns:
        The sharded array.
    """
    if mesh is None:
        return x
    spec = spec or PartitionSpec()
    entries = [*padded_spec(x, without_axes(spec, GATHERED) if is_weight else spec, mesh)]
    entries[dim] = AXIS
    return reshard_to_spec(x, PartitionSpec(*entries), mesh)


def reshard_microbatches(
    x: PyTree, rules: AxisRules, mesh: Mesh | None, batch_axes: tuple[str, ...] = ()
) -> PyTree:
    """Shards [M, rows, ...] leaves: M over the ranks, and the rows over the axes of the batch.

    Args:
        x: [M, rows, ...] leaves.
        rules: Logical axis rules. The rule of "activation_batch" gives the axes of the rows.
        mesh: The mesh. If it is None, `x` is returned as it is.
        batch_axes: Mesh axes that shard the rows in place of the rule. Without them, a mesh with
            explicit axes leaves `x` as the caller has sharded it.

    Returns:
        The sharded leaves.

    Raises:
        ValueError: If the rows of a microbatch are not a multiple of the number of their shards.
    """
    if mesh is None or (AxisType.Explicit in mesh.axis_types and not batch_axes):
        return x
    rule = physical_spec(PartitionSpec(AXIS, "activation_batch"), rules, mesh.axis_names)
    spec = PartitionSpec(AXIS, batch_axes) if batch_axes else rule

    def reshard_leaf(leaf):
        check_divisible(leaf.shape, spec, dict(mesh.shape), "inputs [microbatch, row, ...]")
        return reshard_to_spec(leaf, spec, mesh)

    return jax.tree.map(reshard_leaf, x)


def gather_all(weights: PyTree, specs: PyTree, mesh: Mesh | None, axes: Sequence[str]) -> PyTree:
    """Returns `weights`, sharded by `specs` except that they are gathered over `axes`."""
    return jax.tree.map(
        lambda w, spec: reshard_to_spec(w, without_axes(spec, axes), mesh), weights, specs
    )


def gather_stage(specs: PyTree, axes: Sequence[str] = GATHERED) -> Callable[[PyTree], PyTree]:
    """Returns a function that gathers the weights of one stage over `axes`.

    Args:
        specs: Physical specs of [S, ...] leaves.
        axes: The mesh axes to gather over. With () the function shards the weights by `specs`.

    Returns:
        A function from the weights of a stage, [...] leaves as a rank sees them, to the same
        weights gathered.
    """

    def constrain(w: jax.Array | None, spec: PartitionSpec) -> jax.Array | None:
        mesh = jax.sharding.get_abstract_mesh()
        if w is None or mesh.empty or not len(spec):
            return w
        gathered_spec = without_axes(PartitionSpec(*spec[1:]), axes)
        if AxisType.Explicit in mesh.axis_types:
            return _typed(w, gathered_spec, mesh)
        return lax.with_sharding_constraint(w, padded_spec(w, gathered_spec, mesh))

    def gather(weights: PyTree) -> PyTree:
        return jax.tree.map(constrain, weights, specs, is_leaf=lambda x: x is None)

    return gather


def gather_block(
    weights: PyTree, specs: PyTree, mesh: Mesh | None, axes: Sequence[str], use_shardmap: bool
) -> PyTree:
    """Gathers the [S, ...] weights of one repeat over `axes`.

    Args:
        weights: [S, ...] leaves.
        specs: Their physical specs.
        mesh: The mesh. If it is None, `weights` are returned as they are.
        axes: The mesh axes to gather over.
        use_shardmap: Whether to gather by `lax.all_gather`. If not, a sharding constraint gathers.

    Returns:
        The gathered weights, [S, ...] leaves.
    """
    if mesh is None:
        return weights
    if not use_shardmap:
        gather = gather_stage(specs, axes)
        return on_ranks(gather, mesh=mesh, in_dims=(0,), out_dims=0)(weights)
    return jax.tree.map(partial(_all_gather, mesh=mesh, axes=axes), weights, specs)


def describe_shardings(weights: PyTree, names: PyTree, specs: PyTree) -> str:
    """Returns one line per weight: path, dtype, shape, logical spec and physical spec."""

    def line(path, w, logical, physical):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return f"{name}  {w.dtype}{list(w.shape)}  {tuple(logical)} -> {tuple(physical)}"

    return "\n".join(jax.tree.leaves(jax.tree_util.tree_map_with_path(line, weights, names, specs)))


def _all_gather(w: jax.Array, spec: PartitionSpec, *, mesh: Mesh, axes: Sequence[str]) -> jax.Array:
    gathered_spec = without_axes(spec, axes)

    def gather(shard):
        for dim, (now, then) in enumerate(zip(spec, gathered_spec, strict=True)):
            if now != then:
                names = now if isinstance(now, tuple) else (now,)
                gathered_axes = tuple(name for name in names if name in axes)
                shard = lax.all_gather(shard, gathered_axes, axis=dim, tiled=True)
        return shard

    # Gathered weights are equal on all devices of `axes`, which `check_vma` cannot infer.
    return jax.shard_map(
        gather, mesh=mesh, in_specs=spec, out_specs=gathered_spec, check_vma=False
    )(w)


def _typed(x: jax.Array, spec: PartitionSpec, mesh: AbstractMesh) -> jax.Array:
    """Returns `x` sharded by `spec`: explicit axes by its type, automatic axes by a constraint."""
    explicit = with_axis_type(spec, mesh, AxisType.Explicit)
    x = jax.sharding.reshard(x, padded_spec(x, explicit, mesh))
    if AxisType.Auto not in mesh.axis_types or len(spec) < x.ndim:
        return x
    return lax.with_sharding_constraint(x, with_axis_type(spec, mesh, AxisType.Auto))


def _entry(axes: tuple[str, ...]) -> Any:
    return None if not axes else axes[0] if len(axes) == 1 else axes
