"""Defines an array that some groups of a mesh hold."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ._mesh import MpmdSharding


class MpmdArray:
    """An array that some groups of a mesh hold: each of these groups has the same whole array.

    Pytrees treat it as a leaf. `numpy.asarray` and `float` return its content in a process that has
    one of its groups. In other processes `numpy.asarray` returns an array of dtype `object` that
    holds the `MpmdArray`, which prints its shape and groups, and `float` raises an error.
    `mpmd_to_spmd_reshard` converts it to a `jax.Array`.

    Args:
        partially_addressable_arrays: The array of each group that belongs to this process, in any
            order. Each must be on the devices of its group.
        mpmd_sharding: The groups that hold the array, and its sharding within a group.
        shape: The shape. Required if `partially_addressable_arrays` is empty.
        dtype: The dtype. Required if `partially_addressable_arrays` is empty.

    Raises:
        ValueError: If an array is not a `jax.Array` or not on the devices of one of the groups, two
            arrays are on the same group, shapes, dtypes or specs differ, neither an array nor
            `shape` and `dtype` are given, or `mpmd_sharding` is not an `MpmdSharding`.
    """

    def __init__(
        self,
        partially_addressable_arrays: Iterable[jax.Array],
        mpmd_sharding: MpmdSharding,
        shape: Sequence[int] | None = None,
        dtype: Any = None,
    ) -> None:
        if not isinstance(mpmd_sharding, MpmdSharding):
            raise ValueError(
                f"`mpmd_sharding` is a {type(mpmd_sharding).__name__}. Give an `MpmdSharding`: it "
                "names the groups that have the array."
            )
        arrays = _by_rank(list(partially_addressable_arrays), mpmd_sharding)
        first = next(iter(arrays.values()), None)
        shape = shape if first is None or shape is not None else first.shape
        dtype = dtype if first is None or dtype is not None else first.dtype
        if shape is None or dtype is None:
            raise ValueError(
                "`partially_addressable_arrays` is empty, so its shape and dtype are unknown. "
                "Give `shape` and `dtype`."
            )
        wrong = [a for a in arrays.values() if a.shape != tuple(shape) or a.dtype != dtype]
        if wrong:
            raise ValueError(
                f"An array of `partially_addressable_arrays` is {_kind(wrong[0])}, and the whole "
                f"is {_kind(jax.ShapeDtypeStruct(shape, dtype))}. Give arrays of one kind."
            )
        dtype = jax.ShapeDtypeStruct((), dtype).dtype
        self._set(arrays, mpmd_sharding, tuple(shape), dtype)

    @classmethod
    def of_ranks(
        cls,
        arrays: Mapping[int, jax.Array],
        mpmd_sharding: MpmdSharding,
        shape: Sequence[int],
        dtype: Any,
        *,
        weak_type: bool = False,
        wait: Callable[[Any], Any] = jax.block_until_ready,
    ) -> "MpmdArray":
        """Makes an `MpmdArray` of one array for each group, without any checks.

        `arrays` has those of this process, by the index of their group; `weak_type` is as of a
        Python number; `wait` waits until all arrays in a list are computed.
        """
        array = cls.__new__(cls)
        ordered = {rank: arrays[rank] for rank in sorted(arrays)} if len(arrays) > 1 else arrays
        array._set(ordered, mpmd_sharding, tuple(shape), dtype, weak_type=weak_type, wait=wait)
        return array

    def _set(
        self,
        arrays: Mapping[int, jax.Array],
        mpmd_sharding: MpmdSharding,
        shape: tuple[int, ...],
        dtype: Any,
        *,
        weak_type: bool = False,
        wait: Callable[[Any], Any] = jax.block_until_ready,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.weak_type = weak_type
        self.mpmd_sharding = mpmd_sharding
        self._partially_addressable_arrays: OrderedDict[int, Any] = OrderedDict(arrays)
        self._wait = wait
        self._is_deleted = False

    @property
    def aval(self) -> ShapedArray:
        """Returns the shape, the dtype and whether the dtype is weak."""
        return ShapedArray(self.shape, self.dtype, weak_type=self.weak_type)

    @property
    def mpmd_idxs(self) -> tuple[int, ...]:
        """Returns the indices of the groups that hold the array, in ascending order."""
        return self.mpmd_sharding.mpmd_idxs

    @property
    def is_mpmd_replicated(self) -> bool:
        """Returns whether more than one group holds the array."""
        return len(self.mpmd_idxs) > 1

    @property
    def sharding(self) -> NamedSharding:
        """Returns the sharding over the devices of all groups that hold the array."""
        return self.mpmd_sharding.sharding

    @property
    def spec(self) -> PartitionSpec:
        """Returns the partition spec of the array within a group."""
        return self.mpmd_sharding.spec

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=int))

    @property
    def is_partially_addressable(self) -> bool:
        """Returns whether a group that holds the array belongs to this process."""
        return bool(self._partially_addressable_arrays)

    def on_rank(self, rank: int) -> jax.Array | None:
        """Returns the array of group `rank`, or None if this process does not hold it."""
        return self._partially_addressable_arrays.get(rank)

    @property
    def local_arrays(self) -> list[jax.Array]:
        """Returns the arrays of the groups of this process, in ascending order of the groups."""
        return list(self._partially_addressable_arrays.values())

    @property
    def to_mpmd_local_array(self) -> jax.Array | list[jax.Array] | None:
        """Returns the array of this process's group, a list if it has several, or None."""
        arrays = self.local_arrays
        return arrays[0] if len(arrays) == 1 else arrays or None

    @property
    def first_mpmd_replica(self) -> jax.Array | None:
        """Returns the array of the lowest group if that group belongs to this process, or None."""
        return self.on_rank(self.mpmd_idxs[0]) if self.mpmd_idxs else None

    def first_local_array(self) -> jax.Array:
        """Returns the array of the first group of this process, which must hold it."""
        for array in self._partially_addressable_arrays.values():
            return array
        processes = sorted({self.mpmd_sharding.mpmd_mesh.process_of(r) for r in self.mpmd_idxs})
        raise ValueError(
            f"This array lives on the groups {self.mpmd_idxs} of the processes {processes}, and "
            f"this is process {jax.process_index()}. Read it there."
        )

    def block_until_ready(self) -> "MpmdArray":
        """Waits until the arrays of this process are computed, and returns `self`."""
        self._wait(self.local_arrays)
        return self

    def is_ready(self) -> bool:
        """Returns whether the arrays of this process are computed."""
        return all(array.is_ready() for array in self._partially_addressable_arrays.values())

    def delete(self) -> None:
        """Deletes the arrays of this process, which frees their memory."""
        self.delete_except()

    def delete_except(self, ranks: Collection[int] = ()) -> None:
        """Marks the array as deleted, and deletes the arrays of this process.

        Those of `ranks` are kept, because another `MpmdArray` holds them too.
        """
        self._is_deleted = True
        for rank, array in self._partially_addressable_arrays.items():
            if rank not in ranks:
                array.delete()

    def is_deleted(self) -> bool:
        """Returns whether the array was deleted or donated."""
        arrays = self._partially_addressable_arrays.values()
        return self._is_deleted or any(array.is_deleted() for array in arrays)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        if self.is_partially_addressable or dtype is not None:
            return np.asarray(self._ready(), dtype)
        # JaxPP's arrays are objects to NumPy, so its scripts print `np.array(loss)` in every
        # process, also where the loss is not.
        self.check_not_deleted()
        array = np.empty((), object)
        array[()] = self
        return array

    def check_not_deleted(self) -> None:
        """Raises a `RuntimeError` if the array was deleted or donated."""
        if self._is_deleted:
            raise RuntimeError(
                f"MpmdArray(shape={self.shape}, dtype={self.dtype}) has been deleted. It was "
                "donated to a function, moved by a reshard, or deleted by hand: use the result of "
                "that call instead."
            )

    def _ready(self) -> jax.Array:
        self.check_not_deleted()
        self.block_until_ready()
        return self.first_local_array()

    def item(self) -> Any:
        return self._ready().item()

    def __float__(self) -> float:
        return float(self._ready())

    def __int__(self) -> int:
        return int(self._ready())

    def __bool__(self) -> bool:
        return bool(self._ready())

    def __format__(self, spec: str) -> str:
        return format(self._ready(), spec) if self.is_partially_addressable else repr(self)

    def __repr__(self) -> str:
        if self.ndim == 0 and self._partially_addressable_arrays and not self.is_deleted():
            return f"MpmdArray({self._ready()}, dtype={self.dtype}, mpmd_idxs={self.mpmd_idxs})"
        return (
            f"MpmdArray(shape={self.shape}, dtype={self.dtype}, "
            f"mpmd_idxs={self.mpmd_idxs}, sharding={self.sharding})"
        )


def init_on_ranks(
    make: Callable[[int], PyTree], shapes: PyTree, shardings: PyTree[MpmdSharding]
) -> PyTree[MpmdArray]:
    """Makes arrays by a program of every rank; no device ever holds more than its own part.

    `make` returns the values for a rank. It is traced, and leaves on other ranks may be anything.
    """
    leaves, tree = jax.tree.flatten(shardings)
    arrays_by_rank: list[dict[int, jax.Array]] = [{} for _ in leaves]
    mesh = leaves[0].mpmd_mesh
    for rank in mesh.local_ranks:
        held = [i for i, leaf in enumerate(leaves) if rank in leaf.mpmd_idxs]

        def make_held(rank: int = rank, held: list[int] = held) -> list[jax.Array]:
            values = jax.tree.leaves(make(rank))
            return [values[i] for i in held]

        where = [leaves[i].of_rank(rank) for i in held]
        with jax.set_mesh(mesh.unstack[rank]):
            arrays = jax.jit(make_held, out_shardings=where)()
        for i, array in zip(held, arrays, strict=True):
            arrays_by_rank[i][rank] = array
    parts = zip(arrays_by_rank, leaves, jax.tree.leaves(shapes), strict=True)
    return tree.unflatten(
        MpmdArray.of_ranks(arrays, where, shape.shape, shape.dtype)
        for arrays, where, shape in parts
    )


def _by_rank(arrays: Sequence[Any], where: MpmdSharding) -> dict[int, jax.Array]:
    """Maps each group to the array on its devices, in ascending order of the groups."""
    mesh, by_rank = where.mpmd_mesh, {}
    for i, array in enumerate(arrays):
        if not isinstance(array, jax.Array):
            rank = (*where.mpmd_idxs, 0)[0]
            raise ValueError(
                f"`partially_addressable_arrays[{i}]` is a {type(array).__name__}, which is on no "
                "group. Give a list with one `jax.Array` for each group, such as "
                f"`jax.device_put(x, mpmd_sharding.of_rank({rank}))`."
            )
        name = f"`partially_addressable_arrays[{i}]`, {_kind(array)},"
        ranks = {mesh.device_mpmd_idx.get(device) for device in array.devices()}
        rank = ranks.pop()
        if ranks or rank is None or array.devices() != set(mesh.unstack[rank].devices.flat):
            raise ValueError(
                f"{name} is on {sorted(map(str, array.devices()))}, which are not the devices of "
                "one group of `mpmd_mesh`. Put it on a mesh of `mpmd_mesh.unstack`."
            )
        if rank not in where.mesh_ids or rank in by_rank:
            raise ValueError(
                f"{name} is on group {rank}, and `mesh_ids` is {where.mpmd_idxs}. Give one array "
                "for each of these groups that is in this process."
            )
        if not array.sharding.is_equivalent_to(where.of_rank(rank), array.ndim):
            raise ValueError(
                f"{name} has the sharding {array.sharding}, and `mpmd_sharding` has the spec "
                f"{where.spec}. Reshard the array, or give its spec."
            )
        by_rank[rank] = array
    return {rank: by_rank[rank] for rank in sorted(by_rank)}


def _kind(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"
