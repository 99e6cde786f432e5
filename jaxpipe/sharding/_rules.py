"""From logical axes ("embed", "mlp") to mesh axes ("fsdp", "tensor"): rules, specs, shardings.

A rule is a pair (logical axis, mesh axes). Weights and activations are described once, by logical
axes; these rules alone decide which mesh axes split each of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ._mesh import AXES
from .specs import check_divisible

# The name of every dim of an array, None for a dim without one.
LogicalAxes = tuple[str | None, ...]
Rules = Sequence[tuple[str, Sequence[str]]]

DEFAULT_RULES: Rules = (
    ("activation_batch", ("data", "fsdp", "expert")),
    ("activation_length", ("context",)),
    ("activation_norm_length", ("context",)),  # of what is between products
    ("activation_embed", ()),
    ("activation_mlp", ("tensor",)),
    ("activation_heads", ("tensor",)),
    ("activation_kv_heads", ("tensor",)),
    ("activation_kv", ()),
    ("activation_vocab", ("tensor",)),
    ("activation_stage", ("stage",)),
    ("activation_exp", ("expert",)),
    ("microbatches", ()),
    ("stage", ("stage",)),
    ("circular_repeats", ()),
    ("layers", ()),
    ("embed", ("fsdp", "context", "expert")),
    ("embed_no_exp", ("fsdp", "context")),
    ("q_lora", ("fsdp", "context", "expert")),
    ("kv_lora", ("fsdp", "context", "expert")),
    ("exp", ("expert",)),
    ("mlp", ("tensor",)),
    ("q_heads", ("tensor",)),
    ("kv_heads", ("tensor",)),
    ("kv", ()),
    ("vocab", ("tensor",)),
    ("norm", ()),
)


def override_rules(changes: Rules, base: Rules = DEFAULT_RULES) -> Rules:
    """Returns `base` with the rules of `changes` in place of its own for the same logical axes.

    Args:
        changes: Rules, at most one per logical axis.
        base: The rules to change.

    Returns:
        Rules for the logical axes of `base`.

    Raises:
        ValueError: If a rule is for a logical axis that `base` does not have or has two rules, or
            names an axis that no mesh has.

    Example:
        >>> dict(override_rules((("mlp", ("expert",)),)))["mlp"]
        ('expert',)
    """
    names = [name for name, _ in changes]
    known = dict(base)
    for name, mesh_axes in changes:
        if name not in known:
            raise ValueError(
                f"`logical_axis_rules` has a rule for {name!r}, which nothing is named. Logical "
                f"axes are {', '.join(sorted(known))}."
            )
        if names.count(name) > 1:
            raise ValueError(f"`logical_axis_rules` has {names.count(name)} rules for {name!r}.")
        for axis in mesh_axes:
            if axis not in AXES:
                raise ValueError(
                    f"`logical_axis_rules` maps {name!r} to {axis!r}. Mesh axes are "
                    f"{', '.join(AXES)}."
                )
    return tuple((dict(base) | dict(changes)).items())


def partition_spec(axes: LogicalAxes, rules: Rules) -> PartitionSpec:
    """Returns the mesh axes that each dim is split over.

    A mesh axis splits one dim of an array at most: the first dim whose rule has it.

    Args:
        axes: The logical axis of each dim, or None.
        rules: The mesh axes of each logical axis, such as `DEFAULT_RULES`.

    Returns:
        A spec with an entry per dim.

    Raises:
        ValueError: If `rules` has no rule for one of `axes`.

    Example:
        >>> tuple(partition_spec(("embed", "mlp"), DEFAULT_RULES))
        (('fsdp', 'context', 'expert'), 'tensor')
    """
    table = dict(rules)
    used: set[str] = set()
    dims = []
    for axis in axes:
        if axis is not None and axis not in table:
            raise ValueError(
                f"No rule for the logical axis {axis!r}. `logical_axis_rules` has "
                f"{', '.join(sorted(table))}."
            )
        mesh_axes = tuple(a for a in table.get(axis, ()) if a not in used) if axis else ()
        used.update(mesh_axes)
        dims.append(mesh_axes)
    return PartitionSpec(*dims)


def named_shardings(shapes: Any, axes: Any, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Any:
    """Returns a `NamedSharding` for every leaf.

    Args:
        shapes: Tree of anything with a `shape`.
        axes: Tree of the same structure whose leaves are tuples of logical axes, one per dim.
        mesh: A mesh with the axes that `rules` have for `axes`.
        rules: The mesh axes of each logical axis, such as `DEFAULT_RULES`.

    Returns:
        Tree of the same structure.

    Raises:
        ValueError: If a dim does not divide over the mesh axes its rule gives, or has no rule.

    Example:
        >>> from jaxpipe.sharding import make_mesh
        >>> mesh = make_mesh({}, devices=jax.devices()[:1])
        >>> tuple(named_shardings(jax.numpy.ones((8, 16)), ("embed", "mlp"), mesh).spec)
        (('fsdp', 'context', 'expert'), 'tensor')
    """
    sizes = dict(mesh.shape)

    def sharding(path, leaf, logical: LogicalAxes) -> NamedSharding:
        spec = partition_spec(logical, rules)
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        check_divisible(leaf.shape, spec, sizes, name)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, shapes, axes)


def rules_without_manual_axes(rules: Rules, mesh: AbstractMesh) -> Rules:
    """Returns `rules` without the axes that are manual in `mesh`, as inside `jax.shard_map`.

    Args:
        rules: The mesh axes of each logical axis, such as `DEFAULT_RULES`.
        mesh: The mesh in context.

    Returns:
        Rules for the same logical axes.
    """
    automatic = set(mesh.axis_names) - set(mesh.manual_axes)
    return [(name, [a for a in mesh_axes if a in automatic]) for name, mesh_axes in rules]


@dataclass(frozen=True, eq=False)
class Constrain:
    """Shards activations by the logical axes of their dims, over the mesh in context.

    Axes that are manual where it is called (inside `jax.shard_map`) are left out, so a model's
    code is the same inside a pipeline and outside.

    Attributes:
        rules: The mesh axes of each logical axis, or None to constrain nothing.

    Example:
        >>> constrain = Constrain()
        >>> constrain(jax.numpy.ones((4, 8)), ("activation_batch", "activation_embed")).shape
        (4, 8)
    """

    rules: Rules | None = DEFAULT_RULES

    def __call__(self, x: jax.Array, axes: LogicalAxes) -> jax.Array:
        """Returns `x` sharded as the rules say, or unchanged where all axes of the mesh are manual.

        Args:
            x: An activation of any shape.
            axes: The logical axis of each dim, or None.

        Returns:
            `x`.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if self.rules is None or set(mesh.axis_names) <= set(mesh.manual_axes):
            return x
        spec = partition_spec(axes, rules_without_manual_axes(self.rules, mesh))
        check_divisible(x.shape, spec, dict(mesh.shape), "activation " + str(axes))
        return jax.lax.with_sharding_constraint(x, spec)

    def num_shards(self, axis: str) -> int:
        """Returns the number of shards of a dim with this logical axis.

        Args:
            axis: A logical axis of the rules.

        Returns:
            The number, 1 without rules.
        """
        mesh = jax.sharding.get_abstract_mesh()
        axes = dict(rules_without_manual_axes(self.rules or ((axis, ()),), mesh))[axis]
        return math.prod(mesh.shape.get(name, 1) for name in axes)


no_constraint = Constrain(None)
"""The constraint of a model that runs on one device."""


GATHERED_AXES = ("fsdp", "fsdp_transpose", "context", "expert")
"""Mesh axes that weights are split over to save memory, and gathered over before use."""


def gathered_rules(rules: Rules) -> Rules:
    """Returns `rules` for weights that are whole along `GATHERED_AXES`.

    Routed experts stay split over the axes of "activation_exp", by which devices compute them.

    Args:
        rules: The rules of stored weights.

    Returns:
        Rules for the same logical axes.
    """

    def whole(mesh_axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(axis for axis in mesh_axes if axis not in GATHERED_AXES)

    computed = expert_axes(rules)
    return [(name, computed if name == "exp" else whole(mesh_axes)) for name, mesh_axes in rules]


def expert_axes(rules: Rules) -> Sequence[str]:
    """Returns the mesh axes over whose devices experts are divided where they are computed.

    Args:
        rules: The rules of stored weights. Without "activation_exp" experts are computed where
            they are stored.

    Returns:
        Names of mesh axes.
    """
    return dict(rules).get("activation_exp", dict(rules).get("exp", ()))
