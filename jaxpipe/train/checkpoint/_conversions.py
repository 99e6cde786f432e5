"""Converts states to the canonical state and back, for each of the two ways to store them.

Leaves stack all stages, or every stage has its own tree on the devices of its rank.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from ... import mpmd
from ...sharding import LogicalAxes
from ..plan._state_plan import StatePlan
from ..plan._weight_plan import STACK_AXES, WeightPlan
from ..step._optimizer_state import is_weight_tree
from ..step._per_stage_state import mpmd_mesh, stack_shardings, stack_stages, unstack_stages
from ..step._state import TrainState, state_logical_axes
from ._layer_reordering import (
    LayerReordering,
    delete,
    jit_on_mesh,
    layer_reordering,
    move_and_delete,
)

ToCanonical = Callable[[TrainState], TrainState]
FromCanonical = Callable[[TrainState, TrainState], TrainState]
Shardings = PyTree[NamedSharding]
StoredShardings = PyTree[NamedSharding | mpmd.MpmdSharding]


def round_trip(
    plan: StatePlan, stored: StoredShardings, shardings: Shardings
) -> tuple[ToCanonical, FromCanonical]:
    """Returns `canonical_round_trip`, by the shardings of the canonical state."""
    weights, reordering = plan.weights, layer_reordering(plan.weights)
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


def lay_out(
    plan: StatePlan, stored: StoredShardings, shardings: Shardings, canonical: TrainState
) -> TrainState:
    """Returns those entries of a state that the canonical state has."""
    weights, reordering = plan.weights, layer_reordering(plan.weights)
    if weights.per_stage:
        rest = _boundary_on_ranks(mpmd_mesh(weights), canonical, stored)
        return _with_stages(weights, reordering, rest, canonical, shardings, stored)
    copied = cache(partial(jit_on_mesh, weights.devices.mesh, jnp.copy))

    def copy(x: jax.Array, _: NamedSharding, target: NamedSharding) -> jax.Array:
        return move_and_delete(copied(target), x)

    return _of_stacks(plan, reordering.to_rank_order, copy)(canonical, shardings, stored)


def _of_stacks(plan: StatePlan, stacks: Callable, others: Callable) -> Callable[..., TrainState]:
    """Returns a function of a state and its shardings that changes each stack, and other leaves."""
    axes = state_logical_axes(plan)

    def leaf(x: jax.Array, axes: LogicalAxes, *where: NamedSharding) -> jax.Array:
        return (stacks if is_stacked(axes) else others)(x, *where)

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
        stacked = stack_stages(weights, stages, rank_shardings)
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
        stacked = reordering.to_rank_order(x, where, stack_shardings(weights, rank_shardings))
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


def is_stacked(axes: Any) -> bool:
    return axes[: len(STACK_AXES)] == STACK_AXES
