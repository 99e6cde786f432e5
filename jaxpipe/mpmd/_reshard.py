"""Arrays between the two worlds: divided over all devices, or whole on some groups.

Within a process it is a copy. Across processes groups have nothing in common but collectives, so
every array takes part in one, of its own size; one array is under way at a time.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ._array import MpmdArray, MpmdMesh, MpmdSharding


def spmd_to_mpmd_reshard(
    mpmd_mesh: MpmdMesh, spmd_arrays: PyTree, mpmd_shardings: PyTree
) -> PyTree[MpmdArray]:
    """Arrays of all devices as arrays of some groups.

    Args:
        mpmd_mesh: The groups.
        spmd_arrays: A tree of `jax.Array`: of this process if there is one process, else on the
            devices of the whole mesh.
        mpmd_shardings: A tree like it, of `MpmdSharding`.
    """
    return jax.tree.map(
        lambda x, where: _to_groups(mpmd_mesh, x, where), spmd_arrays, mpmd_shardings
    )


def mpmd_to_spmd_reshard(
    mpmd_mesh: MpmdMesh, mpmd_arrays: PyTree, spmd_shardings: PyTree
) -> PyTree[jax.Array]:
    """Arrays of some groups as arrays of all devices.

    Args:
        mpmd_mesh: The groups.
        mpmd_arrays: A tree of `MpmdArray`.
        spmd_shardings: A tree like it, of shardings over the devices of the whole mesh.
    """
    return jax.tree.map(
        lambda x, where: _from_groups(mpmd_mesh, x, where), mpmd_arrays, spmd_shardings
    )


def _to_groups(mesh: MpmdMesh, x: Any, where: MpmdSharding) -> MpmdArray:
    local = [rank for rank in where.mpmd_idxs if rank in mesh.local_ranks]
    if jax.process_count() == 1:
        arrays = {rank: jax.device_put(x, where.of_rank(rank)) for rank in local}
        return MpmdArray(x.shape, x.dtype, where, arrays)
    everywhere = jax.jit(_same, out_shardings=NamedSharding(mesh.jax_mesh, where.spec))(x)
    shards = {shard.device: shard.data for shard in everywhere.addressable_shards}
    arrays = {}
    for rank in local:
        sharding = where.of_rank(rank)
        of_rank = [shards[device] for device in sharding.addressable_devices]
        arrays[rank] = jax.make_array_from_single_device_arrays(x.shape, sharding, of_rank)
    return MpmdArray(x.shape, x.dtype, where, arrays)


def _from_groups(mesh: MpmdMesh, x: MpmdArray, where: Any) -> jax.Array:
    if jax.process_count() == 1:
        return jax.device_put(x.to_mpmd_local_array(), where)
    move = jax.jit(_of_group, static_argnums=1, out_shardings=where)
    return move(_stacked(mesh, x), x.mpmd_idxs[0])


def _stacked(mesh: MpmdMesh, x: MpmdArray) -> jax.Array:
    """[groups, ...], each group's part on its devices; zeros where there is none."""
    spec = PartitionSpec(mesh.mpmd_axis_name, *x.spec)
    sharding = NamedSharding(mesh.jax_mesh, spec)
    parts = []
    for rank in mesh.local_ranks:
        of_rank = x.on_rank(rank)
        if of_rank is None:
            zeros = np.zeros(x.shape, x.dtype)
            of_rank = jax.device_put(zeros, MpmdSharding(mesh, (rank,), x.spec).of_rank(rank))
        parts += [shard.data[None] for shard in of_rank.addressable_shards]
    shape = (mesh.mpmd_dim, *x.shape)
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _of_group(stacked: jax.Array, rank: int) -> jax.Array:
    return stacked[rank]


def _same(x: jax.Array) -> jax.Array:
    return jnp.asarray(x)
