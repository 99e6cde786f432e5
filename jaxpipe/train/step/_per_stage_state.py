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
from jaxtyping import Array, Int, PyTree

from ... import mpmd
from ..plan._setup import Setup

StageShardings = Sequence[PyTree[mpmd.MpmdSharding]]
"""Shardings of the leaves of each stage, in forward order."""


def layer_ids_by_rank(setup: Setup) -> Int[np.ndarray, "S K"]:
    """Returns the layers of each rank, stage after stage in forward order.

    Args:
        setup: The run.

    Returns:
        [S, K] layers of the model; -1 is padding behind the layers of a rank.
    """
    layers = setup.layout.stage_layer_ids
    rows = [[i for stage in stages for i in layers[stage]] for stages in setup.stages_by_rank]
    most = max(map(len, rows))
    return np.array([row + [-1] * (most - len(row)) for row in rows])


def stack_stages(
    setup: Setup, stages: Sequence[PyTree[mpmd.MpmdArray]], stage_shardings: StageShardings
) -> PyTree[Array]:
    """Stacks the stages of each rank.

    Args:
        setup: The run.
        stages: Weights of each stage in forward order, with leaves [layers, ...].
        stage_shardings: Their shardings.

    Returns:
        Weights with leaves [S, K, ...].
    """
    mesh, num_layers = mpmd_mesh(setup), layer_ids_by_rank(setup).shape[1]
    stages_by_leaf = list(zip(*map(jax.tree.leaves, stages), strict=True))
    dims = [(num_layers, *leaf_stages[0].shape[1:]) for leaf_stages in stages_by_leaf]
    dtypes = [leaf_stages[0].dtype for leaf_stages in stages_by_leaf]
    specs = [sharding.spec for sharding in jax.tree.leaves(stage_shardings[0])]
    shards: list[list[jax.Array]] = [[] for _ in specs]
    for rank in mesh.local_ranks:
        shardings = [NamedSharding(mesh.unstack[rank], spec) for spec in specs]
        shapes = map(_abstract_array, dims, dtypes, shardings)
        local = [stage for stage in setup.stages_by_rank[rank] if _layer_counts(setup)[stage]]
        parts = [
            [leaf_stages[stage].on_rank(rank) for stage in local] for leaf_stages in stages_by_leaf
        ]
        for found, stacked_leaf in zip(shards, _concatenation(tuple(shapes))(parts), strict=True):
            found += [shard.data[None] for shard in stacked_leaf.addressable_shards]
    stacked = [
        jax.make_array_from_single_device_arrays(
            (mesh.mpmd_dim, *dim), _stacked_sharding(mesh, spec), found, dtype=dtype
        )
        for dim, spec, found, dtype in zip(dims, specs, shards, dtypes, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(stages[0]), stacked)


def unstack_stages(
    setup: Setup, stack: PyTree[Array], stage_shardings: StageShardings
) -> list[PyTree[mpmd.MpmdArray]]:
    """Splits a stack into stages: the inverse of `stack_stages`.

    Args:
        setup: The run.
        stack: Weights with leaves [S, K, ...].
        stage_shardings: Shardings of the stages.

    Returns:
        Weights of each stage in forward order, with leaves [layers, ...].
    """
    mesh, leaves, counts = mpmd_mesh(setup), jax.tree.leaves(stack), _layer_counts(setup)
    specs = [sharding.spec for sharding in jax.tree.leaves(stage_shardings[0])]
    found: list[list[dict[int, jax.Array]]] = [[{} for _ in leaves] for _ in counts]
    for rank in mesh.local_ranks:
        shardings = tuple(NamedSharding(mesh.unstack[rank], spec) for spec in specs)
        part = [_on_rank(leaf, where) for leaf, where in zip(leaves, shardings, strict=True)]
        local = [stage for stage in setup.stages_by_rank[rank] if counts[stage]]
        cut = _split(tuple(counts[stage] for stage in local), shardings)(part)
        for stage, stage_leaves in zip(local, cut, strict=True):
            for arrays, array in zip(found[stage], stage_leaves, strict=True):
                arrays[rank] = array
    return [
        jax.tree.unflatten(
            jax.tree.structure(stack),
            list(map(partial(_stage_array, count), leaves, jax.tree.leaves(shardings), arrays)),
        )
        for count, shardings, arrays in zip(counts, stage_shardings, found, strict=True)
    ]


def stack_shardings(setup: Setup, stage_shardings: StageShardings) -> PyTree[NamedSharding]:
    """Returns the shardings of the leaves of a stack.

    Args:
        setup: The run.
        stage_shardings: Shardings of the stages.

    Returns:
        A tree like the weights of one stage.
    """
    mesh = mpmd_mesh(setup)
    return jax.tree.map(lambda sharding: _stacked_sharding(mesh, sharding.spec), stage_shardings[0])


def mpmd_mesh(setup: Setup) -> mpmd.MpmdMesh:
    """Returns the run's mesh as one submesh per rank."""
    return mpmd.MpmdMesh(setup.mesh, "stage")


def _stacked_sharding(mesh: mpmd.MpmdMesh, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(mesh.jax_mesh, PartitionSpec(mesh.mpmd_axis_name, *spec))


def _layer_counts(setup: Setup) -> list[int]:
    return list(map(len, setup.layout.stage_layer_ids))


def _abstract_array(
    dims: tuple[int, ...], dtype: Any, sharding: NamedSharding
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)


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
        return [
            jnp.concatenate([*stages, jnp.zeros(_padding_shape(stages, shape), shape.dtype)])
            for stages, shape in zip(parts, shapes, strict=True)
        ]

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


def _padding_shape(parts: list[jax.Array], stacked: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    return (stacked.shape[0] - sum(map(len, parts)), *stacked.shape[1:])
