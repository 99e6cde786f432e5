"""Gathers of weights whose shardings are given as specs over mesh axes, rather than by rules.

A caller that has resolved logical axes itself, as the Flax front ends have, uses these. The
functions of the `Gather` take the weights of one stage, or whole arrays if they are given a mesh.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ...sharding._rules import GATHERED_AXES
from ...sharding.specs import padded_spec, with_axis_type, without_axes
from ._collectives import all_gather_leaf
from ._gather import Gather, TreeFunction, When, identity, map_leaves


def gather_by_specs(
    specs: PyTree,
    *,
    when: When = "tick",
    axes: Sequence[str] = GATHERED_AXES,
    mesh: Mesh | None = None,
) -> Gather:
    """Returns a `Gather` for weights described by specs.

    Args:
        specs: The spec of every weight. Dims beyond the end of a spec keep their sharding.
        when: Gather in every "tick", "once", or once per "repeat".
        axes: The mesh axes to gather over.
        mesh: The mesh of whole arrays. None inside a stage, whose mesh is in context; without one
            the functions return their argument.

    Returns:
        A `Gather` by constraints, whose collectives XLA's partitioner chooses.
    """

    def constrain(spec_of: Callable[[PartitionSpec], PartitionSpec]) -> TreeFunction:
        def constrain_leaf(w: jax.Array, spec: PartitionSpec) -> jax.Array:
            context = jax.sharding.get_abstract_mesh() if mesh is None else mesh
            is_given = len(spec) and not context.empty
            return _constrained(w, spec_of(spec), context) if is_given else w

        return lambda tree: map_leaves(constrain_leaf, tree, specs)

    unshard = constrain(lambda spec: without_axes(spec, axes))
    return Gather(
        when, unshard=unshard, constrain_unsharded=unshard, reduce_scatter=constrain(identity)
    )


def all_gather_by_specs(
    specs: PyTree, *, mesh: Mesh, axes: Sequence[str] = GATHERED_AXES
) -> Gather:
    """Returns a `Gather` of whole arrays with one `lax.all_gather` per weight and sharded dim.

    Args:
        specs: The spec of every weight, with an entry for every dim that is sharded.
        mesh: The mesh.
        axes: The mesh axes to gather over.

    Returns:
        A `Gather` that only unshards. JAX derives the reduce-scatter of gradients from it.
    """

    def unshard_leaf(w: jax.Array, spec: PartitionSpec) -> jax.Array:
        gathered = without_axes(spec, axes)
        gather = partial(all_gather_leaf, stored=spec, gathered=gathered, unsharded=gathered)
        # Gathered weights are equal on all devices of `axes`, which `check_vma` cannot infer.
        return jax.shard_map(gather, mesh=mesh, in_specs=spec, out_specs=gathered, check_vma=False)(
            w
        )

    return Gather(unshard=lambda weights: map_leaves(unshard_leaf, weights, specs))


def _constrained(x: jax.Array, spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> jax.Array:
    """Returns `x` sharded by `spec`: explicit axes by its type, automatic axes by a constraint."""
    if AxisType.Explicit not in mesh.axis_types:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, padded_spec(x, spec, mesh)))
    explicit = padded_spec(x, with_axis_type(spec, mesh, AxisType.Explicit), mesh)
    x = jax.sharding.reshard(x, NamedSharding(mesh, explicit))
    if AxisType.Auto not in mesh.axis_types or len(spec) < x.ndim:
        return x
    automatic = with_axis_type(spec, mesh, AxisType.Auto)
    return lax.with_sharding_constraint(x, NamedSharding(mesh, automatic))
