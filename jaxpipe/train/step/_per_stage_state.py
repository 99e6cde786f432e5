"""Converts between per-stage weights, each on its rank, and one stack of layers on all devices.

Programs of ranks have no array in common that could be saved or restored. In a stack, [S, K, ...]
for S ranks and K layers of the rank that has most, each rank's part is on the rank: no data moves
until one program of all devices reorders the layers.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ... import mpmd
from ..plan._weight_plan import WeightPlan


def stack_stages(
    weights: WeightPlan, stages: Sequence[mpmd.MpmdArray], spec: PartitionSpec
) -> jax.Array:
    """Stacks a leaf of all stages [layers, ...], in forward order, as ranks have them, [S, K, ...].

    `spec` is that of the leaf on the devices of a rank.
    """
    mesh = mpmd_mesh(weights)
    dims, dtype = (weights.slot_layer_ids.shape[1], *stages[0].shape[1:]), stages[0].dtype
    shards: list[jax.Array] = []
    for rank in mesh.local_ranks:
        where = NamedSharding(mesh.unstack[rank], spec)
        join = _concatenation(jax.ShapeDtypeStruct(dims, dtype, sharding=where))
        part = join([stages[i].on_rank(rank) for i in _stages_with_layers(weights, rank)])
        shards += [shard.data[None] for shard in part.addressable_shards]
    return jax.make_array_from_single_device_arrays(
        (mesh.mpmd_dim, *dims), stack_sharding(weights, spec), shards, dtype=dtype
    )


def unstack_stages(
    weights: WeightPlan, stack: jax.Array, shardings: Sequence[mpmd.MpmdSharding]
) -> list[mpmd.MpmdArray]:
    """Splits a stack [S, K, ...] into stages with their shardings: inverts `stack_stages`."""
    mesh, counts = mpmd_mesh(weights), _layer_counts(weights)
    rank_arrays: list[dict[int, jax.Array]] = [{} for _ in counts]
    for rank in mesh.local_ranks:
        where = NamedSharding(mesh.unstack[rank], shardings[0].spec)
        shards = [s.data[0] for s in stack.addressable_shards if s.device in where.device_set]
        part = jax.make_array_from_single_device_arrays(stack.shape[1:], where, shards)
        local = _stages_with_layers(weights, rank)
        cut = _split(tuple(counts[stage] for stage in local), where)(part)
        for stage, array in zip(local, cut, strict=True):
            rank_arrays[stage][rank] = array
    return [
        _stage_array((count, *stack.shape[2:]), stack.dtype, sharding, arrays)
        for count, sharding, arrays in zip(counts, shardings, rank_arrays, strict=True)
    ]


def stack_sharding(weights: WeightPlan, spec: PartitionSpec) -> NamedSharding:
    """Returns the sharding of a stack of a leaf that has `spec` on the devices of a rank."""
    mesh = mpmd_mesh(weights)
    return NamedSharding(mesh.jax_mesh, PartitionSpec(mesh.mpmd_axis_name, *spec))


def mpmd_mesh(weights: WeightPlan) -> mpmd.MpmdMesh:
    """Returns the mesh of a run as one submesh per rank."""
    return mpmd.MpmdMesh(weights.devices.mesh, "stage")


def _layer_counts(weights: WeightPlan) -> list[int]:
    return list(map(len, weights.layout.stage_layer_ids))


def _stages_with_layers(weights: WeightPlan, rank: int) -> list[int]:
    """Returns the stages of a rank that have layers, in forward order."""
    assert weights.stages_by_rank is not None, "every stage has a tree of its own"
    counts = _layer_counts(weights)
    return [stage for stage in weights.stages_by_rank[rank] if counts[stage]]


def _stage_array(
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: mpmd.MpmdSharding,
    arrays: dict[int, jax.Array],
) -> mpmd.MpmdArray:
    """Builds a leaf of a stage; one without layers may be on ranks that do not have the stage."""
    if not shape[0]:
        here = set(sharding.mpmd_mesh.local_ranks).intersection(sharding.mpmd_idxs)
        empty = np.zeros(shape, dtype)
        arrays = {rank: jax.device_put(empty, sharding.of_rank(rank)) for rank in sorted(here)}
    return mpmd.MpmdArray.of_ranks(arrays, sharding, shape, dtype)


@lru_cache
def _concatenation(shape: jax.ShapeDtypeStruct) -> Callable[[list[Any]], jax.Array]:
    """Compiles the concatenation of a leaf of a rank's stages, padded with zeros."""

    def join(stages: list[jax.Array]) -> jax.Array:
        num_padding = shape.shape[0] - sum(map(len, stages))
        padding = jnp.zeros((num_padding, *shape.shape[1:]), shape.dtype)
        return jnp.concatenate([*stages, padding])

    return jax.jit(join, out_shardings=shape.sharding)


@lru_cache
def _split(counts: tuple[int, ...], where: NamedSharding) -> Callable[[jax.Array], list[jax.Array]]:
    """Compiles the split of a rank's part of a stack into its stages."""
    offsets = np.cumsum((0, *counts))

    def cut(part: jax.Array) -> list[jax.Array]:
        return [part[a:b] for a, b in pairwise(offsets)]

    return jax.jit(cut, out_shardings=[where] * len(counts))
