"""Stages that lie apart, each on its rank, from and to one stack of layers on all devices.

Programs of ranks have nothing in common that could be saved or restored. In a stack, [S, K, ...]
for S ranks and K layers of the rank that has the most, each rank's part is on the rank: nothing
moves until one program of all devices puts the layers in order.
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
"""Of the leaves of each stage, in forward order."""


def layer_ids_by_rank(setup: Setup) -> Int[np.ndarray, "S K"]:
    """The numbers of each rank's layers, stage after stage in forward order, and -1 behind them."""
    layers = setup.layout.layers_of_stages
    rows = [[i for stage in stages for i in layers[stage]] for stages in setup.stages_by_rank]
    most = max(map(len, rows))
    return np.array([row + [-1] * (most - len(row)) for row in rows])


def stack_stages(
    setup: Setup, stages: Sequence[PyTree[mpmd.MpmdArray]], places: StageShardings
) -> PyTree[Array]:
    """[S, K, ...] leaves of the [layers, ...] leaves of each stage."""
    mesh, num_layers = mpmd_mesh(setup), layer_ids_by_rank(setup).shape[1]
    of_leaves = list(zip(*map(jax.tree.leaves, stages), strict=True))
    dims = [(num_layers, *of_stages[0].shape[1:]) for of_stages in of_leaves]
    dtypes = [of_stages[0].dtype for of_stages in of_leaves]
    specs = [place.spec for place in jax.tree.leaves(places[0])]
    shards: list[list[jax.Array]] = [[] for _ in specs]
    for rank in mesh.local_ranks:
        shardings = [NamedSharding(mesh.unstack[rank], spec) for spec in specs]
        shapes = map(_abstract_array, dims, dtypes, shardings)
        mine = [stage for stage in setup.stages_by_rank[rank] if _num_layers_by_stage(setup)[stage]]
        parts = [[of_stages[stage].on_rank(rank) for stage in mine] for of_stages in of_leaves]
        for found, joined in zip(shards, _concatenation(tuple(shapes))(parts), strict=True):
            found += [shard.data[None] for shard in joined.addressable_shards]
    stacked = [
        jax.make_array_from_single_device_arrays(
            (mesh.mpmd_dim, *dim), _stacked_sharding(mesh, spec), found, dtype=dtype
        )
        for dim, spec, found, dtype in zip(dims, specs, shards, dtypes, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(stages[0]), stacked)


def unstack_stages(
    setup: Setup, stack: PyTree[Array], places: StageShardings
) -> list[PyTree[mpmd.MpmdArray]]:
    """The inverse of `stack_stages`."""
    mesh, leaves, counts = mpmd_mesh(setup), jax.tree.leaves(stack), _num_layers_by_stage(setup)
    specs = [place.spec for place in jax.tree.leaves(places[0])]
    found: list[list[dict[int, jax.Array]]] = [[{} for _ in leaves] for _ in counts]
    for rank in mesh.local_ranks:
        shardings = tuple(NamedSharding(mesh.unstack[rank], spec) for spec in specs)
        part = [_on_rank(leaf, where) for leaf, where in zip(leaves, shardings, strict=True)]
        mine = [stage for stage in setup.stages_by_rank[rank] if counts[stage]]
        cut = _split(tuple(counts[stage] for stage in mine), shardings)(part)
        for stage, of_stage in zip(mine, cut, strict=True):
            for arrays, array in zip(found[stage], of_stage, strict=True):
                arrays[rank] = array
    return [
        jax.tree.unflatten(
            jax.tree.structure(stack),
            list(map(partial(_stage_array, count), leaves, jax.tree.leaves(of_stage), of_leaves)),
        )
        for count, of_stage, of_leaves in zip(counts, places, found, strict=True)
    ]


def stack_shardings(setup: Setup, places: StageShardings) -> PyTree[NamedSharding]:
    """Of the leaves of a stack."""
    mesh = mpmd_mesh(setup)
    return jax.tree.map(lambda place: _stacked_sharding(mesh, place.spec), places[0])


def mpmd_mesh(setup: Setup) -> mpmd.MpmdMesh:
    """The ranks."""
    return mpmd.MpmdMesh(setup.mesh, "stage")


def _stacked_sharding(mesh: mpmd.MpmdMesh, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(mesh.jax_mesh, PartitionSpec(mesh.mpmd_axis_name, *spec))


def _num_layers_by_stage(setup: Setup) -> list[int]:
    return list(map(len, setup.layout.layers_of_stages))


def _abstract_array(
    dims: tuple[int, ...], dtype: Any, sharding: NamedSharding
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)


def _stage_array(
    count: int, leaf: jax.Array, place: mpmd.MpmdSharding, arrays: dict[int, jax.Array]
) -> mpmd.MpmdArray:
    """A leaf of a stage. One without layers may lie where its stage is not."""
    shape = (count, *leaf.shape[2:])
    if not count:
        here = set(place.mpmd_mesh.local_ranks).intersection(place.mpmd_idxs)
        nothing = np.zeros(shape, leaf.dtype)
        arrays = {rank: jax.device_put(nothing, place.of_rank(rank)) for rank in sorted(here)}
    return mpmd.MpmdArray.of_ranks(arrays, place, shape, leaf.dtype)


def _on_rank(leaf: jax.Array, where: NamedSharding) -> jax.Array:
    """[K, ...] of a rank, from the devices of `where`."""
    shards = [s.data[0] for s in leaf.addressable_shards if s.device in where.device_set]
    return jax.make_array_from_single_device_arrays(leaf.shape[1:], where, shards)


@lru_cache
def _concatenation(shapes: tuple[jax.ShapeDtypeStruct, ...]) -> Callable[[Any], list[jax.Array]]:
    """Of every leaf the parts of a rank's stages, one after the other, and zeros behind them."""

    def join(parts: list[list[jax.Array]]) -> list[jax.Array]:
        return [
            jnp.concatenate([*of_leaf, jnp.zeros(_padding_shape(of_leaf, shape), shape.dtype)])
            for of_leaf, shape in zip(parts, shapes, strict=True)
        ]

    return jax.jit(join, out_shardings=[shape.sharding for shape in shapes])


@lru_cache
def _split(
    counts: tuple[int, ...], shardings: tuple[NamedSharding, ...]
) -> Callable[[list[jax.Array]], list[list[jax.Array]]]:
    """Of every stage of a rank its part of every leaf."""
    ends = np.cumsum((0, *counts))

    def cut(leaves: list[jax.Array]) -> list[list[jax.Array]]:
        return [[leaf[a:b] for leaf in leaves] for a, b in pairwise(ends)]

    return jax.jit(cut, out_shardings=[list(shardings)] * len(counts))


def _padding_shape(parts: list[jax.Array], whole: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    return (whole.shape[0] - sum(map(len, parts)), *whole.shape[1:])
