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
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ... import mpmd, sharding
from ...engines.fsdp import spec_over_data
from ...sharding import LogicalAxes
from ...sharding.specs import axes_of_dim
from ..plan._optimizer import make_optimizer
from ..plan._weight_plan import STACK_AXES, StatePlan, WeightPlan
from ..step._optimizer_state import init_optimizer_state, is_weight_tree
from ..step._per_stage_state import mpmd_mesh, stack_sharding, stack_stages, unstack_stages
from ..step._state import TrainState, state_logical_axes, state_shapes
from ._layer_reordering import (
    LayerReordering,
    delete,
    is_in_layer_order,
    jit_on_mesh,
    layer_reordering,
    move_and_delete,
)

ToCanonical = Callable[[TrainState], TrainState]
FromCanonical = Callable[[TrainState, TrainState], TrainState]
StoredShardings = PyTree[NamedSharding | mpmd.MpmdSharding]


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
        is_divided = plan.config.shard_optimizer_over_data and name == "optimizer"

        def leaf_shape(leaf: jax.ShapeDtypeStruct, axes: LogicalAxes) -> jax.ShapeDtypeStruct:
            stacked = len(STACK_AXES) if _is_stacked(axes) else 0
            shape, spec = leaf.shape[stacked:], sharding.partition_spec(axes[stacked:], rules)
            spec = spec_over_data(spec, shape, mesh) if is_divided else spec
            if stacked:
                shape, spec = (num_layers, *shape), PartitionSpec(None, *spec)
            where = NamedSharding(mesh, spec)
            if is_per_stage or _is_stacked(axes):
                where = shard_over_ranks(shape, where, in_order and _is_stacked(axes))
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
    weights, reordering = plan.weights, layer_reordering(plan.weights)
    shardings = _canonical_shardings(plan)
    if weights.per_stage:
        return (
            lambda state: _join_stages(weights, reordering, state, shardings, stored),
            lambda state, canonical: _with_stages(
                weights, reordering, state, canonical, shardings, stored
            ),
        )
    to_layer_order = _of_stacks(plan, reordering.to_layer_order, lambda x, *_: x)
    to_rank_order = _of_stacks(plan, reordering.to_rank_order, lambda x, *_: x)
    return (
        lambda state: to_layer_order(state, shardings),
        lambda _, canonical: to_rank_order(canonical, shardings, stored),
    )


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
    weights, reordering = plan.weights, layer_reordering(plan.weights)
    if weights.per_stage:
        rest = _boundary_on_ranks(mpmd_mesh(weights), canonical, stored)
        return _with_stages(weights, reordering, rest, canonical, shardings, stored)
    copied = cache(partial(jit_on_mesh, mesh, jnp.copy))

    def copy(x: jax.Array, _: NamedSharding, target: NamedSharding) -> jax.Array:
        return move_and_delete(copied(target), x)

    return _of_stacks(plan, reordering.to_rank_order, copy)(canonical, shardings, stored)


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


def _of_stacks(plan: StatePlan, stacks: Callable, others: Callable) -> Callable[..., TrainState]:
    """Returns a function of a state and its shardings that changes each stack, and other leaves."""
    axes = state_logical_axes(plan)

    def leaf(x: jax.Array, axes: LogicalAxes, *where: NamedSharding) -> jax.Array:
        return (stacks if _is_stacked(axes) else others)(x, *where)

    def change(state: TrainState, *shardings: PyTree) -> TrainState:
        return {
            name: jax.tree.map(leaf, x, axes[name], *(tree[name] for tree in shardings))
            for name, x in state.items()
        }

    return change


def _join_stages(
    weights: WeightPlan,
    reordering: LayerReordering,
    state: TrainState,
    shardings: PyTree[NamedSharding],
    rank_shardings: PyTree[mpmd.MpmdSharding],
) -> TrainState:
    """Converts per-stage state to the canonical state. Deletes the stages."""
    mesh = mpmd_mesh(weights)

    def stack(where: NamedSharding, *stages_and_shardings: Any) -> jax.Array:
        half = len(stages_and_shardings) // 2
        stages, rank_shardings = stages_and_shardings[:half], stages_and_shardings[half:]
        stacked = stack_stages(weights, stages, rank_shardings[0].spec)
        delete(stages, once=stacked)
        return reordering.to_layer_order(stacked, where)

    def join(x: PyTree, where: PyTree, rank_shardings: PyTree) -> PyTree:
        if not is_weight_tree(x):
            return mpmd.mpmd_to_spmd_reshard(mesh, x, where, donate=False)
        stages = jax.tree.map(stack, where["stages"], *x["stages"], *rank_shardings["stages"])
        return mpmd.mpmd_to_spmd_reshard(mesh, _boundary(x), _boundary(where), donate=False) | {
            "stages": stages
        }

    return {
        name: jax.tree.map(join, x, shardings[name], rank_shardings[name], is_leaf=is_weight_tree)
        for name, x in state.items()
    }


def _boundary_on_ranks(
    mesh: mpmd.MpmdMesh, canonical: TrainState, rank_shardings: PyTree[mpmd.MpmdSharding]
) -> TrainState:
    """Puts the leaves outside of stages on the ranks that use them."""

    def move(x: PyTree, rank_shardings: PyTree) -> PyTree:
        if is_weight_tree(x):
            x, rank_shardings = _boundary(x), _boundary(rank_shardings)
        return mpmd.spmd_to_mpmd_reshard(mesh, x, rank_shardings, donate=False)

    return {
        name: jax.tree.map(move, x, rank_shardings[name], is_leaf=is_weight_tree)
        for name, x in canonical.items()
    }


def _with_stages(
    weights: WeightPlan,
    reordering: LayerReordering,
    rest: TrainState,
    canonical: TrainState,
    shardings: PyTree[NamedSharding],
    rank_shardings: PyTree[mpmd.MpmdSharding],
) -> TrainState:
    """Returns `rest` with the stages of a canonical state, each on its rank."""

    def cut(x: jax.Array, where: NamedSharding, *rank_shardings: mpmd.MpmdSharding) -> list[Any]:
        target = stack_sharding(weights, rank_shardings[0].spec)
        stacked = reordering.to_rank_order(x, where, target)
        stages = unstack_stages(weights, stacked, rank_shardings)
        delete(stacked, once=stages)
        return stages

    def with_stages(x: PyTree, where: PyTree, rank_shardings: PyTree, rest: PyTree) -> PyTree:
        if not is_weight_tree(x):
            return rest
        trees = (x["stages"], where["stages"], *rank_shardings["stages"])
        stages_by_leaf = [cut(*leaf) for leaf in zip(*map(jax.tree.leaves, trees), strict=True)]
        tree = jax.tree.structure(x["stages"])
        count = len(rank_shardings["stages"])
        by_stage = zip(*stages_by_leaf, strict=True) if stages_by_leaf else [()] * count
        return rest | {"stages": [tree.unflatten(leaves) for leaves in by_stage]}

    return {
        name: jax.tree.map(
            with_stages,
            x,
            shardings[name],
            rank_shardings[name],
            rest[name],
            is_leaf=is_weight_tree,
        )
        for name, x in canonical.items()
    }


def _boundary(w: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in w.items() if name != "stages"}


def _is_stacked(axes: Any) -> bool:
    return axes[: len(STACK_AXES)] == STACK_AXES
