"""The canonical state: independent of the pipeline, with layers in forward order, [L, ...].

Checkpoints store this state, so that any layout and engine can resume from them. Layers after the
pipeline are stored separately, and join the others only in a run that divides the layers in
another way.

Devices that are nearly full with a state have no room for a second one. So the stacks of layers
are reordered one at a time, and each source is deleted.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ... import sharding
from ...engines.fsdp import spec_over_data
from ...sharding import LogicalAxes
from ...sharding.specs import axes_of_dim
from ..plan._optimizer import make_optimizer
from ..plan._state_plan import StatePlan
from ..plan._weight_plan import STACK_AXES
from ..step._optimizer_state import init_optimizer_state, is_weight_tree
from ..step._state import TrainState, state_logical_axes, state_shapes
from ._conversions import (
    FromCanonical,
    StoredShardings,
    ToCanonical,
    is_stacked,
    lay_out,
    round_trip,
)
from ._layer_reordering import delete, is_in_layer_order, jit_on_mesh


def canonical_shapes(plan: StatePlan) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns the shapes and shardings of a canonical state.

    Every stack is sharded over the ranks: along layers if the ranks have them in forward order, so
    that nothing is communicated; else along another dim, so that no rank ever has more than its
    share; along layers if no other dim divides. With per-stage state the leaves outside of stages
    are sharded over the ranks, too. A leaf of which no dim divides is replicated.
    """
    in_order, is_per_stage = is_in_layer_order(plan.weights), plan.weights.per_stage
    plan = _with_one_stage(plan, plan.weights.num_layers_after)
    axes, rules = state_logical_axes(plan), plan.weights.devices.rules
    num_layers, mesh = plan.weights.layout.num_layers, plan.weights.devices.mesh

    def part_shapes(name: str, shapes: PyTree) -> PyTree[jax.ShapeDtypeStruct]:
        is_divided = plan.zero1 and name == "optimizer"

        def leaf_shape(leaf: jax.ShapeDtypeStruct, axes: LogicalAxes) -> jax.ShapeDtypeStruct:
            stacked = len(STACK_AXES) if is_stacked(axes) else 0
            shape, spec = leaf.shape[stacked:], sharding.partition_spec(axes[stacked:], rules)
            spec = spec_over_data(spec, shape, mesh) if is_divided else spec
            if stacked:
                shape, spec = (num_layers, *shape), PartitionSpec(None, *spec)
            where = NamedSharding(mesh, spec)
            if is_per_stage or is_stacked(axes):
                where = shard_over_ranks(shape, where, in_order and is_stacked(axes))
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=where)

        return jax.tree.map(leaf_shape, shapes, axes[name])

    return {name: part_shapes(name, shapes) for name, shapes in state_shapes(plan).items()}


def canonical_round_trip(
    plan: StatePlan, stored: StoredShardings
) -> tuple[ToCanonical, FromCanonical]:
    """Returns functions that convert the state of a run to the canonical state and back.

    They are `canonical = to_canonical(state)` and `state = from_canonical(state, canonical)`,
    compiled at their first call; a state may be that of some entries, such as the weights alone.
    Each deletes the stacks of its argument one by one as they are converted. Leaves that are in no
    stack may be shared by both states.
    """
    return round_trip(plan, stored, _canonical_shardings(plan))


def state_from_canonical(
    plan: StatePlan, stored: StoredShardings, canonical: TrainState
) -> TrainState:
    """Lays out a canonical state, or some of its entries, such as the weights alone, for a run.

    The arrays of the canonical state are deleted one by one; with per-stage state, those outside of
    the stages are kept.
    """
    mesh, num_layers = plan.weights.devices.mesh, plan.weights.layout.num_layers
    shardings = _canonical_shardings(plan)
    canonical = {
        name: _regroup_layers(mesh, num_layers, x, shardings[name]) for name, x in canonical.items()
    }
    return lay_out(plan, stored, shardings, canonical)


def first_optimizer_state(plan: StatePlan, weights: PyTree) -> TrainState:
    """Returns canonical weights, laid out for a run, and the first state of its optimizer.

    Arrays that are laid out anew are deleted.
    """
    mesh, shardings = plan.weights.devices.mesh, _canonical_shardings(plan)
    num_layers = plan.weights.layout.num_layers
    weights = _regroup_layers(mesh, num_layers, weights, shardings["weights"])
    plan = _with_one_stage(plan, plan.weights.num_layers_after)

    def with_stages(tree: PyTree, change: Callable[[jax.Array], jax.Array]) -> PyTree:
        def node(x: Any) -> Any:
            return x | {"stages": jax.tree.map(change, x["stages"])} if is_weight_tree(x) else x

        return jax.tree.map(node, tree, is_leaf=is_weight_tree)

    def init(weights: PyTree) -> PyTree:
        stacked = with_stages(weights, lambda x: x[None, None])
        state = init_optimizer_state(plan, make_optimizer(plan), stacked)
        return with_stages(state, lambda x: x[0, 0])

    state = jit_on_mesh(mesh, init, shardings["optimizer"])(weights)
    return {"weights": weights, "optimizer": state}


def with_layers_after(plan: StatePlan, layers_after: int) -> StatePlan:
    """Returns the state of a pipeline of one stage with so many layers after it."""
    if layers_after == plan.weights.num_layers_after:
        return plan
    return _with_one_stage(plan, layers_after)


def _with_one_stage(plan: StatePlan, layers_after: int) -> StatePlan:
    """Returns the state of a pipeline of one stage in one program, with so many layers after it."""
    return dataclasses.replace(plan, weights=plan.weights.on_one_stage(layers_after))


def _canonical_shardings(plan: StatePlan) -> PyTree[NamedSharding]:
    return jax.tree.map(lambda leaf: leaf.sharding, canonical_shapes(plan))


def _regroup_layers(
    mesh: Mesh, num_layers: int, part: PyTree, shardings: PyTree[NamedSharding]
) -> PyTree:
    """Moves layers of a canonical state between its stages and the layers after the pipeline."""

    @cache
    def splitting(where: tuple[NamedSharding, ...]) -> Callable[..., tuple[jax.Array, ...]]:
        def split(*parts: jax.Array) -> tuple[jax.Array, ...]:
            layers = jnp.concatenate(parts)
            return (layers[:num_layers], layers[num_layers:])[: len(where)]

        return jit_on_mesh(mesh, split, where)

    def regroup_stacks(
        parts: tuple[jax.Array, ...], where: tuple[NamedSharding, ...]
    ) -> tuple[jax.Array, ...]:
        regrouped = splitting(where)(*parts)
        delete(parts, once=regrouped)
        return regrouped

    def regroup_weights(w: dict[str, Any], where: dict[str, Any]) -> dict[str, Any]:
        before, after = _layer_stacks(w), _layer_stacks(where)
        lengths = {len(leaf) for leaf in jax.tree.leaves(w["stages"])}
        if lengths == {num_layers}:
            return w
        leaves = zip(*map(jax.tree.leaves, before), strict=True)
        shardings_after = zip(*map(jax.tree.leaves, after), strict=True)
        regrouped = list(map(regroup_stacks, leaves, shardings_after))
        # A state may have no array for any weight of a layer.
        by_stack = zip(*regrouped, strict=True) if regrouped else [()] * len(after)
        stages, *rest = map(jax.tree.structure(w["stages"]).unflatten, by_stack)
        head = {name: leaf for name, leaf in w["head"].items() if name != "layers"}
        head |= {"layers": rest[0]} if rest else {}
        return w | {"head": head, "stages": stages}

    return jax.tree.map(
        lambda x, where: regroup_weights(x, where) if is_weight_tree(x) else x,
        part,
        shardings,
        is_leaf=is_weight_tree,
    )


def _layer_stacks(w: dict[str, Any]) -> list[PyTree]:
    """Returns the stack of layers of the pipeline, and the stack after it if there is one."""
    return [w["stages"], *([w["head"]["layers"]] if "layers" in w["head"] else [])]


def shard_over_ranks(shape: Sequence[int], where: NamedSharding, by_first: bool) -> NamedSharding:
    """Adds the axis of ranks to the largest dim that it divides, preferably (not) the first dim."""
    sizes = where.mesh.shape
    dims = [axes_of_dim(dim) for dim in where.spec]
    preferred = sorted(range(len(shape)), key=lambda i: ((i == 0) != by_first, -shape[i]))
    for i in preferred:
        axes = (*dims[i], "stage")
        if shape[i] % math.prod(sizes[axis] for axis in axes) == 0:
            return NamedSharding(where.mesh, PartitionSpec(*dims[:i], axes, *dims[i + 1 :]))
    return where
