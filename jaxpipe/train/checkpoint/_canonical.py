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
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ... import mpmd, sharding
from ...sharding._rules import LogicalAxes
from ...sharding.layout import LayerLayout
from ...sharding.specs import axes_of_dim
from ..plan._setup import STACK_AXES, Setup
from ..step._mpmd import mpmd_state_shardings
from ..step._per_stage_state import mpmd_mesh, stack_shardings, stack_stages, unstack_stages
from ..step._state import TrainState, state_logical_axes, state_rules, state_shapes, state_shardings
from ._layer_reordering import (
    LayerReordering,
    delete,
    is_in_layer_order,
    jit_on_mesh,
    layer_reordering,
    move_and_delete,
)


def canonical_shapes(setup: Setup) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns the shapes and shardings of a canonical state.

    Every stack is sharded over the ranks: along layers if the ranks have them in forward order, so
    that nothing is communicated; else along another dim, so that no rank ever has more than its
    share; along layers if no other dim divides. With per-stage state the leaves outside of stages
    are sharded over the ranks, too. A leaf of which no dim divides is replicated.
    """
    in_order, is_per_stage, setup = (
        is_in_layer_order(setup),
        setup.per_stage_state,
        _as_one_stack(setup),
    )
    axes, rules = state_logical_axes(setup), state_rules(setup)

    def part_shapes(name: str, shapes: PyTree) -> PyTree[jax.ShapeDtypeStruct]:
        def leaf_shape(leaf: jax.ShapeDtypeStruct, axes: LogicalAxes) -> jax.ShapeDtypeStruct:
            shape, spec = leaf.shape, sharding.partition_spec(axes, rules[name])
            if _is_stacked(axes):
                shape = (setup.layout.num_layers, *shape[len(STACK_AXES) :])
                spec = PartitionSpec(None, *spec[len(STACK_AXES) :])
            where = NamedSharding(setup.mesh, spec)
            if is_per_stage or _is_stacked(axes):
                where = _shard_over_ranks(shape, where, in_order and _is_stacked(axes))
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=where)

        return jax.tree.map(leaf_shape, shapes, axes[name])

    return {name: part_shapes(name, shapes) for name, shapes in state_shapes(setup).items()}


ToCanonical = Callable[[TrainState], TrainState]
FromCanonical = Callable[[TrainState, TrainState], TrainState]


def canonical_round_trip(setup: Setup) -> tuple[ToCanonical, FromCanonical]:
    """Returns functions that convert the state of a run to the canonical state and back.

    They are `canonical = to_canonical(state)` and `state = from_canonical(state, canonical)`,
    compiled at their first call. Each deletes the stacks of its argument one by one as they are
    converted. Leaves that are in no stack may be shared by both states.

    Args:
        setup: The run.

    Returns:
        `to_canonical` and `from_canonical`.
    """
    reordering, shardings = layer_reordering(setup), _canonical_shardings(setup)
    if setup.per_stage_state:
        rank_shardings = mpmd_state_shardings(setup)
        return (
            lambda state: _per_stage_to_canonical(
                setup, reordering, state, shardings, rank_shardings
            ),
            lambda state, canonical: _per_stage_from_canonical(
                setup, reordering, state, canonical, shardings, rank_shardings
            ),
        )
    axes, wanted = state_logical_axes(setup), state_shardings(setup)

    def leaf_to_canonical(x: jax.Array, where: NamedSharding, axes: LogicalAxes) -> jax.Array:
        return reordering.to_layer_order(x, where) if _is_stacked(axes) else x

    def leaf_from_canonical(
        x: jax.Array, where: NamedSharding, wanted: NamedSharding, axes: LogicalAxes
    ) -> jax.Array:
        return reordering.to_rank_order(x, where, wanted) if _is_stacked(axes) else x

    return (
        lambda state: jax.tree.map(leaf_to_canonical, state, shardings, axes),
        lambda _, canonical: jax.tree.map(leaf_from_canonical, canonical, shardings, wanted, axes),
    )


def state_from_canonical(setup: Setup, canonical: TrainState) -> TrainState:
    """Lays out a canonical state, or a part of it, for a run.

    The arrays of the canonical state are deleted one by one; with per-stage state, those outside
    of the stages are kept.

    Args:
        setup: The run.
        canonical: The canonical state or some of its entries, such as the weights alone, with any
            number of layers after the pipeline.

    Returns:
        The same entries in the layout of the run.
    """
    reordering, shardings = layer_reordering(setup), _canonical_shardings(setup)
    canonical = {name: _regroup_layers(setup, x, shardings[name]) for name, x in canonical.items()}
    if setup.per_stage_state:
        rank_shardings = mpmd_state_shardings(setup)
        rest = _boundary_on_ranks(setup, canonical, rank_shardings)
        return _per_stage_from_canonical(
            setup, reordering, rest, canonical, shardings, rank_shardings
        )
    axes, wanted = state_logical_axes(setup), state_shardings(setup)
    copied = cache(partial(jit_on_mesh, setup, jnp.copy))

    def lay_out(
        x: jax.Array, where: NamedSharding, wanted: NamedSharding, axes: LogicalAxes
    ) -> jax.Array:
        if _is_stacked(axes):
            return reordering.to_rank_order(x, where, wanted)
        return move_and_delete(copied(wanted), x)

    return {
        name: jax.tree.map(lay_out, x, shardings[name], wanted[name], axes[name])
        for name, x in canonical.items()
    }


def with_layers_after(setup: Setup, layers_after: int) -> Setup:
    """Returns `setup` for a pipeline of one stage with so many layers after it."""
    if layers_after == setup.num_layers_after_pipeline:
        return setup
    num_layers = setup.layout.num_layers + setup.num_layers_after_pipeline - layers_after
    return dataclasses.replace(_as_one_stack(setup), layout=LayerLayout(1, 1, num_layers))


def _canonical_shardings(setup: Setup) -> PyTree[NamedSharding]:
    return jax.tree.map(lambda leaf: leaf.sharding, canonical_shapes(setup))


def _per_stage_to_canonical(
    setup: Setup,
    reordering: LayerReordering,
    state: TrainState,
    shardings: PyTree[NamedSharding],
    rank_shardings: PyTree[mpmd.MpmdSharding],
) -> TrainState:
    """Converts per-stage state to the canonical state. Deletes the stages."""
    mesh = mpmd_mesh(setup)

    def stack(where: NamedSharding, *stages_and_shardings: Any) -> jax.Array:
        half = len(stages_and_shardings) // 2
        stages, rank_shardings = stages_and_shardings[:half], stages_and_shardings[half:]
        stacked = stack_stages(setup, stages, rank_shardings)
        delete(stages, once=stacked)
        return reordering.to_layer_order(stacked, where)

    def join(x: PyTree, where: PyTree, rank_shardings: PyTree) -> PyTree:
        if not _is_weight_tree(x):
            return mpmd.mpmd_to_spmd_reshard(mesh, x, where, donate=False)
        stages = jax.tree.map(stack, where["stages"], *x["stages"], *rank_shardings["stages"])
        return mpmd.mpmd_to_spmd_reshard(mesh, _boundary(x), _boundary(where), donate=False) | {
            "stages": stages
        }

    return jax.tree.map(join, state, shardings, rank_shardings, is_leaf=_is_weight_tree)


def _boundary_on_ranks(
    setup: Setup, canonical: TrainState, rank_shardings: PyTree[mpmd.MpmdSharding]
) -> TrainState:
    """Puts the leaves outside of stages on the ranks that use them."""
    mesh = mpmd_mesh(setup)

    def move(x: PyTree, rank_shardings: PyTree) -> PyTree:
        if not _is_weight_tree(x):
            return mpmd.spmd_to_mpmd_reshard(mesh, x, rank_shardings, donate=False)
        return mpmd.spmd_to_mpmd_reshard(
            mesh, _boundary(x), _boundary(rank_shardings), donate=False
        )

    return {
        name: jax.tree.map(move, x, rank_shardings[name], is_leaf=_is_weight_tree)
        for name, x in canonical.items()
    }


def _per_stage_from_canonical(
    setup: Setup,
    reordering: LayerReordering,
    rest: TrainState,
    canonical: TrainState,
    shardings: PyTree[NamedSharding],
    rank_shardings: PyTree[mpmd.MpmdSharding],
) -> TrainState:
    """Returns `rest` with the stages of a canonical state, each on its rank."""

    def cut(x: jax.Array, where: NamedSharding, *rank_shardings: mpmd.MpmdSharding) -> list[Any]:
        stacked = reordering.to_rank_order(x, where, stack_shardings(setup, rank_shardings))
        stages = unstack_stages(setup, stacked, rank_shardings)
        delete(stacked, once=stages)
        return stages

    def with_stages(x: PyTree, where: PyTree, rank_shardings: PyTree, rest: PyTree) -> PyTree:
        if not _is_weight_tree(x):
            return rest
        trees = (x["stages"], where["stages"], *rank_shardings["stages"])
        stages_by_leaf = [cut(*leaf) for leaf in zip(*map(jax.tree.leaves, trees), strict=True)]
        tree = jax.tree.structure(x["stages"])
        return rest | {
            "stages": [tree.unflatten(leaves) for leaves in zip(*stages_by_leaf, strict=True)]
        }

    return {
        name: jax.tree.map(
            with_stages,
            x,
            shardings[name],
            rank_shardings[name],
            rest[name],
            is_leaf=_is_weight_tree,
        )
        for name, x in canonical.items()
    }


def _as_one_stack(setup: Setup) -> Setup:
    """Returns `setup` with one stack of layers in place of per-stage state."""
    if not setup.per_stage_state:
        return setup
    config = setup.config.model_copy(update={"pipeline_engine": "none"})
    layout = LayerLayout(1, 1, setup.layout.num_layers)
    return dataclasses.replace(setup, config=config, layout=layout)


def _regroup_layers(setup: Setup, part: PyTree, shardings: PyTree[NamedSharding]) -> PyTree:
    """Moves layers of a canonical state between its stages and the layers after the pipeline."""
    num_layers = setup.layout.num_layers

    @cache
    def splitting(where: tuple[NamedSharding, ...]) -> Callable[..., tuple[jax.Array, ...]]:
        def split(*parts: jax.Array) -> tuple[jax.Array, ...]:
            layers = jnp.concatenate(parts)
            return (layers[:num_layers], layers[num_layers:])[: len(where)]

        return jit_on_mesh(setup, split, where)

    def regroup_stacks(
        parts: tuple[jax.Array, ...], where: tuple[NamedSharding, ...]
    ) -> tuple[jax.Array, ...]:
        found = splitting(where)(*parts)
        delete(parts, once=found)
        return found

    def regroup_weights(w: dict[str, Any], where: dict[str, Any]) -> dict[str, Any]:
        before, after = _layer_stacks(w), _layer_stacks(where)
        lengths = {len(leaf) for leaf in jax.tree.leaves(w["stages"])}
        if lengths == {num_layers}:
            return w
        leaves = zip(*map(jax.tree.leaves, before), strict=True)
        wanted = zip(*map(jax.tree.leaves, after), strict=True)
        found = list(map(regroup_stacks, leaves, wanted))
        stages, *rest = map(jax.tree.structure(w["stages"]).unflatten, zip(*found, strict=True))
        head = {name: leaf for name, leaf in w["head"].items() if name != "layers"}
        head |= {"layers": rest[0]} if rest else {}
        return w | {"head": head, "stages": stages}

    return jax.tree.map(
        lambda x, where: regroup_weights(x, where) if _is_weight_tree(x) else x,
        part,
        shardings,
        is_leaf=_is_weight_tree,
    )


def _layer_stacks(w: dict[str, Any]) -> list[PyTree]:
    """Returns the stack of layers of the pipeline, and the stack after it if there is one."""
    return [w["stages"], *([w["head"]["layers"]] if "layers" in w["head"] else [])]


def _boundary(w: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in w.items() if name != "stages"}


def _is_weight_tree(x: Any) -> bool:
    """Returns whether `x` has the structure of the weights, as Adam's moments have."""
    return isinstance(x, dict) and {"head", "stages"} <= x.keys()


def _is_stacked(axes: Any) -> bool:
    return axes[: len(STACK_AXES)] == STACK_AXES


def _shard_over_ranks(shape: Sequence[int], where: NamedSharding, by_first: bool) -> NamedSharding:
    """Adds the axis of ranks to the largest dim that it divides, preferably (not) the first dim."""
    sizes = where.mesh.shape
    dims = [axes_of_dim(dim) for dim in where.spec]
    wanted = sorted(range(len(shape)), key=lambda i: ((i == 0) != by_first, -shape[i]))
    for i in wanted:
        axes = (*dims[i], "stage")
        if shape[i] % math.prod(sizes[axis] for axis in axes) == 0:
            return NamedSharding(where.mesh, PartitionSpec(*dims[:i], axes, *dims[i + 1 :]))
    return where
