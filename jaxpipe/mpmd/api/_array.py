"""Arrays that live on some groups of a mesh."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.sharding import NamedSharding, PartitionSpec

from ._mesh import MpmdSharding


class MpmdArray:
    """An array that lives on some groups of a mesh, the same on each of them.

    A leaf of pytrees. Where one of its groups is in this process, `numpy.asarray` and the like
    give its content; `mpmd_to_spmd_reshard` makes a `jax.Array` of it.

    Args:
        partially_addressable_arrays: The array of each of its groups that is in this process, in
            any order. Each must be on the devices of its group.
        mpmd_sharding: Its groups, and how it is divided within them.
        shape: The shape, needed where `partially_addressable_arrays` is empty.
        dtype: The dtype, likewise.

    Raises:
        ValueError: If an array is no `jax.Array` or not on one of the groups, two are on the same
            one, shapes, dtypes or specs differ, neither an array nor `shape` and `dtype` are given,
            or `mpmd_sharding` is no `MpmdSharding`.
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
        """Returns an array made of one array for each group, without checking these.

        Args:
            arrays: The array of each group that is in this process, by the group's index.
            mpmd_sharding: Its groups, and how it is divided within them.
            shape: The shape.
            dtype: The dtype.
            weak_type: Whether the dtype is weak, as that of a Python number is.
            wait: A function that waits until the arrays in a list are computed.
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
        self._is_gone = False

    @property
    def aval(self) -> ShapedArray:
        """The shape and dtype."""
        return ShapedArray(self.shape, self.dtype, weak_type=self.weak_type)

    @property
    def mpmd_idxs(self) -> tuple[int, ...]:
        """The groups it lives on, in ascending order."""
        return self.mpmd_sharding.mpmd_idxs

    @property
    def is_mpmd_replicated(self) -> bool:
        """Whether it lives on more than one group."""
        return len(self.mpmd_idxs) > 1

    @property
    def sharding(self) -> NamedSharding:
        """Over the devices of all its groups."""
        return self.mpmd_sharding.sharding

    @property
    def spec(self) -> PartitionSpec:
        """How it is divided within a group."""
        return self.mpmd_sharding.spec

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=int))

    @property
    def is_partially_addressable(self) -> bool:
        """Whether one of its groups is in this process."""
        return bool(self._partially_addressable_arrays)

    def on_rank(self, rank: int) -> jax.Array | None:
        """Returns the array of a group, if it lives there and the group is in this process."""
        return self._partially_addressable_arrays.get(rank)

    @property
    def local_arrays(self) -> list[jax.Array]:
        """The array of each of its groups in this process, in the order of the groups."""
        return list(self._partially_addressable_arrays.values())

    @property
    def to_mpmd_local_array(self) -> jax.Array | list[jax.Array] | None:
        """The array of its group in this process, a list if there are several, None if none."""
        arrays = self.local_arrays
        return arrays[0] if len(arrays) == 1 else arrays or None

    @property
    def first_mpmd_replica(self) -> jax.Array | None:
        """The array of the first of all its groups, if that group is in this process."""
        return self.on_rank(self.mpmd_idxs[0]) if self.mpmd_idxs else None

    def first_local_array(self) -> jax.Array:
        """Returns the array of its first group in this process.

        Raises:
            ValueError: If it has none here.
        """
        for array in self._partially_addressable_arrays.values():
            return array
        processes = sorted({self.mpmd_sharding.mpmd_mesh.process_of(r) for r in self.mpmd_idxs})
        raise ValueError(
            f"This array lives on the groups {self.mpmd_idxs} of the processes {processes}, and "
            f"this is process {jax.process_index()}. Read it there."
        )

    def block_until_ready(self) -> "MpmdArray":
        """Waits until it is computed, and returns it."""
        self._wait(self.local_arrays)
        return self

    def is_ready(self) -> bool:
        """Returns whether it is computed."""
        return all(array.is_ready() for array in self._partially_addressable_arrays.values())

    def delete(self) -> None:
        """Frees the memory of its arrays in this process."""
        self.give_away()

    def give_away(self, kept: Collection[int] = ()) -> None:
        """Marks it as deleted, and deletes its arrays in this process.

        Args:
            kept: The groups whose array now belongs to another `MpmdArray` too, and is not deleted.
        """
        self._is_gone = True
        for rank, array in self._partially_addressable_arrays.items():
            if rank not in kept:
                array.delete()

    def is_deleted(self) -> bool:
        """Returns whether it was deleted, or given to a function that may overwrite it."""
        arrays = self._partially_addressable_arrays.values()
        return self._is_gone or any(array.is_deleted() for array in arrays)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self._ready(), dtype)

    def check_not_deleted(self) -> None:
        """Raises an error if the array was deleted.

        Raises:
            RuntimeError: If it was deleted.
        """
        if self._is_gone:
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
        return (
            f"MpmdArray(shape={self.shape}, dtype={self.dtype}, "
            f"mpmd_idxs={self.mpmd_idxs}, sharding={self.sharding})"
        )


def _by_rank(arrays: Sequence[Any], where: MpmdSharding) -> dict[int, jax.Array]:
    """Returns each array by the group on whose devices it is, in the order of the groups."""
    mesh, found = where.mpmd_mesh, {}
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
        if rank not in where.mesh_ids or rank in found:
            raise ValueError(
                f"{name} is on group {rank}, and `mesh_ids` is {where.mpmd_idxs}. Give one array "
                "for each of these groups that is in this process."
            )
        if not array.sharding.is_equivalent_to(where.of_rank(rank), array.ndim):
            raise ValueError(
                f"{name} has the sharding {array.sharding}, and `mpmd_sharding` has the spec "
                f"{where.spec}. Reshard the array, or give its spec."
            )
        found[rank] = array
    return {rank: found[rank] for rank in sorted(found)}


def _kind(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"
