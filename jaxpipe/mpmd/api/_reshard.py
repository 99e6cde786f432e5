"""Moves arrays between SPMD (sharded over all devices) and MPMD (whole on some groups).

With one process a move is a copy. With several processes each array is moved by one collective of
its own over all devices, because processes exchange arrays by collectives only.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree

from ._arguments import broadcast_prefix
from ._array import MpmdArray
from ._mesh import MpmdMesh, MpmdSharding, no_ambient_mesh


def spmd_to_mpmd_reshard(
    mpmd_mesh: MpmdMesh,
    spmd_arrays: PyTree,
    mpmd_shardings: PyTree,
    threshold: int | None = None,
    *,
    donate: bool = True,
) -> PyTree[MpmdArray]:
    """Moves SPMD arrays to groups of a mesh, and deletes the originals unless told otherwise.

    Args:
        mpmd_mesh: The mesh with its groups.
        spmd_arrays: A tree of `jax.Array`. With several processes each array must be on the devices
            of the whole mesh.
        mpmd_shardings: A tree of `MpmdSharding`, a prefix of `spmd_arrays`. An array whose sharding
            has no groups moves to group 0.
        threshold: The largest number of bytes in transfer at a time, or None for no limit. A single
            array may be larger.
        donate: Whether `spmd_arrays` are deleted.

    Returns:
        A tree like `spmd_arrays`, of arrays of the same shapes and dtypes.

    Raises:
        ValueError: If `mpmd_shardings` is not a prefix of `spmd_arrays` or holds another type than
            `MpmdSharding`, or `threshold` is below 1.
    """
    move, name = partial(_to_groups, mpmd_mesh), "mpmd_shardings"
    return _move_tree(move, spmd_arrays, mpmd_shardings, name, MpmdSharding, threshold, donate)


def mpmd_to_spmd_reshard(
    mpmd_mesh: MpmdMesh,
    mpmd_arrays: PyTree,
    spmd_shardings: PyTree,
    threshold: int | None = None,
    *,
    donate: bool = True,
) -> PyTree[jax.Array]:
    """Moves arrays of groups to all devices, and deletes the originals unless told otherwise.

    Args:
        mpmd_mesh: The mesh with its groups.
        mpmd_arrays: A tree of `MpmdArray`.
        spmd_shardings: A tree of shardings over the devices of the whole mesh, a prefix of
            `mpmd_arrays`.
        threshold: The largest number of bytes in transfer at a time, or None for no limit. A single
            array may be larger.
        donate: Whether `mpmd_arrays` are deleted.

    Returns:
        A tree like `mpmd_arrays`, of arrays of the same shapes and dtypes.

    Raises:
        ValueError: If `spmd_shardings` is not a prefix of `mpmd_arrays` or holds another type than
            `jax.sharding.Sharding`, or `threshold` is below 1.
    """
    move, name = partial(_from_groups, mpmd_mesh), "spmd_shardings"
    return _move_tree(move, mpmd_arrays, spmd_shardings, name, Sharding, threshold, donate)


def _move_tree(
    move: Callable[[Any, Any], Any],
    arrays: PyTree,
    shardings: PyTree,
    name: str,
    kind: type,
    threshold: int | None,
    donate: bool,
) -> PyTree:
    if threshold is not None and threshold < 1:
        raise ValueError(f"`threshold` is {threshold}. Give a number of bytes, 1 or more, or None.")
    leaves, tree = jax.tree.flatten(arrays)
    if isinstance(arrays, list | tuple) and isinstance(shardings, list | tuple):
        shardings = type(arrays)(shardings)
    targets = broadcast_prefix(shardings, arrays, name)
    wrong = [(path, target) for path, target in targets if not isinstance(target, kind)]
    if wrong:
        path, target = wrong[0]
        raise ValueError(f"`{path}` is {target!r}. Give a {kind.__name__} for every array.")
    last = {id(x): i for i, x in enumerate(leaves)}
    results, in_transfer, size = [], [], 0
    with no_ambient_mesh():
        for i, (x, (_, target)) in enumerate(zip(leaves, targets, strict=True)):
            num_bytes = math.prod(x.shape) * x.dtype.itemsize
            if threshold is not None and in_transfer and size + num_bytes > threshold:
                jax.block_until_ready(in_transfer)
                in_transfer, size = [], 0
            results.append(move(x, target))
            in_transfer.append(results[-1])
            size += num_bytes
            if donate and last[id(x)] == i and isinstance(x, jax.Array | MpmdArray):
                x.delete()
    return tree.unflatten(results)


def _put(x: Any, where: Sharding) -> jax.Array:
    """Puts `x`, or a copy of it if the result could share memory with `x`, on devices."""
    # `jax.device_put(..., may_alias=False)` still shares memory where shards are alike, and
    # `donate=True` deletes nothing on one CPU device (jax 0.10.2): the result would die with `x`.
    if isinstance(x, jax.Array) and x.devices() & where.device_set:
        x = jnp.copy(x)
    return jax.device_put(x, where)


def _to_groups(mesh: MpmdMesh, x: Any, where: MpmdSharding) -> MpmdArray:
    if not where.mesh_ids:
        where = replace(where, mesh_ids=(0,))
    local = [rank for rank in where.mpmd_idxs if rank in mesh.local_ranks]
    weak = getattr(x, "weak_type", False)
    if jax.process_count() == 1:
        arrays = {rank: _put(x, where.of_rank(rank)) for rank in local}
        return MpmdArray.of_ranks(arrays, where, x.shape, x.dtype, weak_type=weak)
    x = jax.device_put(x, _automatic(x.sharding))
    everywhere = jax.jit(_identity, out_shardings=NamedSharding(mesh.auto_mesh, where.spec))(x)
    shards = {shard.device: shard.data for shard in everywhere.addressable_shards}
    arrays = {}
    for rank in local:
        sharding = where.of_rank(rank)
        of_rank = [shards[device] for device in sharding.addressable_devices]
        arrays[rank] = jax.make_array_from_single_device_arrays(x.shape, sharding, of_rank)
    return MpmdArray.of_ranks(arrays, where, x.shape, x.dtype, weak_type=weak)


def _from_groups(mesh: MpmdMesh, x: MpmdArray, where: Any) -> jax.Array:
    x.check_not_deleted()
    if jax.process_count() == 1:
        return _put(x.first_local_array(), where)
    move = jax.jit(_of_group, static_argnums=1, out_shardings=_automatic(where))
    return jax.device_put(move(_stacked(mesh, x), x.mpmd_idxs[0]), where)


def _automatic(sharding: Sharding) -> Sharding:
    """Returns the same sharding on automatic axes, as explicit axes are part of an array's type."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh = sharding.mesh
    return NamedSharding(Mesh(np.asarray(mesh.devices), mesh.axis_names), sharding.spec)


def _stacked(mesh: MpmdMesh, x: MpmdArray) -> jax.Array:
    """Returns a [groups, ...] array: `x` on the groups that hold it and zeros on the others."""
    spec = PartitionSpec(mesh.mpmd_axis_name, *x.spec)
    sharding = NamedSharding(mesh.auto_mesh, spec)
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


def _identity(x: jax.Array) -> jax.Array:
    return jnp.asarray(x)
