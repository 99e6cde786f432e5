"""Converts between per-stage weights, each on its rank, and one stack of layers on all devices.

Programs of ranks have no array in common that could be saved or restored. In a stack, [S, K, ...]
for S ranks and K layers of the rank that has most, each rank's part is on the rank: no data moves
until one program of all devices reorders the layers.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from ... import mpmd
from ..plan._weight_plan import WeightPlan

StageShardings = Sequence[PyTree[mpmd.MpmdSharding]]
"""Shardings of the leaves of each stage, in forward order."""


def stack_stages(
    weights: WeightPlan, stages: Sequence[PyTree[mpmd.MpmdArray]], stage_shardings: StageShardings
) -> PyTree[Array]:
    """Stacks stages [layers, ...], in forward order, as ranks have them, [S, K, ...]."""
    mesh, num_layers = mpmd_mesh(weights), weights.slot_layer_ids.shape[1]
    stages_by_leaf = list(zip(*map(jax.tree.leaves, stages), strict=True))
    dims = [(num_layers, *leaf_stages[0].shape[1:]) for leaf_stages in stages_by_leaf]
    dtypes = [leaf_stages[0].dtype for leaf_stages in stages_by_leaf]
    specs = [sharding.spec for sharding in jax.tree.leaves(stage_shardings[0])]
    shards: list[list[jax.Array]] = [[] for _ in specs]
    for rank in mesh.local_ranks:
        shapes = tuple(
            jax.ShapeDtypeStruct(dim, dtype, sharding=NamedSharding(mesh.unstack[rank], spec))
            for dim, dtype, spec in zip(dims, dtypes, specs, strict=True)
        )
        local = _stages_with_layers(weights, rank)
        parts = [
            [leaf_stages[stage].on_rank(rank) for stage in local] for leaf_stages in stages_by_leaf
        ]
        for leaf_shards, stacked_leaf in zip(shards, _concatenation(shapes)(parts), strict=True):
            leaf_shards += [shard.data[None] for shard in stacked_leaf.addressable_shards]
    stacked = [
        jax.make_array_from_single_device_arrays(
            (mesh.mpmd_dim, *dim), _stacked_sharding(mesh, spec), leaf_shards, dtype=dtype
        )
        for dim, spec, leaf_shards, dtype in zip(dims, specs, shards, dtypes, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(stages[0]), stacked)


def unstack_stages(
    weights: WeightPlan, stack: PyTree[Array], stage_shardings: StageShardings
) -> list[PyTree[mpmd.MpmdArray]]:
    """Splits a stack [S, K, ...] into stages: the inverse of `stack_stages`."""
    mesh, leaves, counts = mpmd_mesh(weights), jax.tree.leaves(stack), _layer_counts(weights)
    specs = [sharding.spec for sharding in jax.tree.leaves(stage_shardings[0])]
    rank_arrays: list[list[dict[int, jax.Array]]] = [[{} for _ in leaves] for _ in counts]
    for rank in mesh.local_ranks:
        shardings = tuple(NamedSharding(mesh.unstack[rank], spec) for spec in specs)
        part = [_on_rank(leaf, where) for leaf, where in zip(leaves, shardings, strict=True)]
        local = _stages_with_layers(weights, rank)
        cut = _split(tuple(counts[stage] for stage in local), shardings)(part)
        for stage, stage_leaves in zip(local, cut, strict=True):
            for arrays, array in zip(rank_arrays[stage], stage_leaves, strict=True):
                arrays[rank] = array
    return [
        jax.tree.unflatten(
            jax.tree.structure(stack),
            list(map(partial(_stage_array, count), leaves, jax.tree.leaves(shardings), arrays)),
        )
        for count, shardings, arrays in zip(counts, stage_shardings, rank_arrays, strict=True)
    ]


def stack_shardings(weights: WeightPlan, stage_shardings: StageShardings) -> PyTree[NamedSharding]:
    """Returns the shardings of the leaves of a stack."""
    mesh = mpmd_mesh(weights)
    return jax.tree.map(lambda sharding: _stacked_sharding(mesh, sharding.spec), stage_shardings[0])


def mpmd_mesh(weights: WeightPlan) -> mpmd.MpmdMesh:
    """Returns the mesh of a run as one submesh per rank."""
    return mpmd.MpmdMesh(weights.devices.mesh, "stage")


def _stacked_sharding(mesh: mpmd.MpmdMesh, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(mesh.jax_mesh, PartitionSpec(mesh.mpmd_axis_name, *spec))


def _layer_counts(weights: WeightPlan) -> list[int]:
    return list(map(len, weights.layout.stage_layer_ids))


def _stages_with_layers(weights: WeightPlan, rank: int) -> list[int]:
    """Returns the stages of a rank that have layers, in forward order."""
    assert weights.stages_by_rank is not None, "every stage has a tree of its own"
    counts = _layer_counts(weights)
    return [stage for stage in weights.stages_by_rank[rank] if counts[stage]]


def _stage_array(
    count: int, leaf: jax.Array, sharding: mpmd.MpmdSharding, arrays: dict[int, jax.Array]
) -> mpmd.MpmdArray:
    """Builds a leaf of a stage; one without layers may be on ranks that do not have the stage."""
    shape = (count, *leaf.shape[2:])
    if not count:
        here = set(sharding.mpmd_mesh.local_ranks).intersection(sharding.mpmd_idxs)
        empty = np.zeros(shape, leaf.dtype)
        arrays = {rank: jax.device_put(empty, sharding.of_rank(rank)) for rank in sorted(here)}
    return mpmd.MpmdArray.of_ranks(arrays, sharding, shape, leaf.dtype)


def _on_rank(leaf: jax.Array, where: NamedSharding) -> jax.Array:
    """Returns the [K, ...] part of a rank, from shards on the devices of `where`."""
    shards = [s.data[0] for s in leaf.addressable_shards if s.device in where.device_set]
    return jax.make_array_from_single_device_arrays(leaf.shape[1:], where, shards)


@lru_cache
def _concatenation(shapes: tuple[jax.ShapeDtypeStruct, ...]) -> Callable[[Any], list[jax.Array]]:
    """Compiles the concatenation of a rank's stages, padded with zeros, for every leaf."""

    def join(parts: list[list[jax.Array]]) -> list[jax.Array]:
        joined = []
        for stages, shape in zip(parts, shapes, strict=True):
            num_padding = shape.shape[0] - sum(map(len, stages))
            padding = jnp.zeros((num_padding, *shape.shape[1:]), shape.dtype)
            joined.append(jnp.concatenate([*stages, padding]))
        return joined

    return jax.jit(join, out_shardings=[shape.sharding for shape in shapes])


@lru_cache
def _split(
    counts: tuple[int, ...], shardings: tuple[NamedSharding, ...]
) -> Callable[[list[jax.Array]], list[list[jax.Array]]]:
    """Compiles the split of a rank's leaves into its stages."""
    offsets = np.cumsum((0, *counts))

    def cut(leaves: list[jax.Array]) -> list[list[jax.Array]]:
        return [[leaf[a:b] for leaf in leaves] for a, b in pairwise(offsets)]

    return jax.jit(cut, out_shardings=[list(shardings)] * len(counts))
