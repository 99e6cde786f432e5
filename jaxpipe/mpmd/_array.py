"""A mesh whose groups run programs of their own, and arrays that live on some of these groups."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


@dataclass(frozen=True)
class MpmdMesh:
    """A mesh of devices, one axis of which tells apart groups with programs of their own.

    Args:
        jax_mesh: All devices. Its other axes shard arrays within a group, automatically.
        mpmd_axis_name: The axis along which the groups lie: a rank is an index along it.

    Raises:
        ValueError: If there is no such axis, or another one is explicit or manual.
    """

    jax_mesh: Mesh
    mpmd_axis_name: str

    def __post_init__(self) -> None:
        mesh, name = self.jax_mesh, self.mpmd_axis_name
        if name not in mesh.axis_names:
            raise ValueError(
                f"`mpmd_axis_name` is {name!r}, and the mesh has the axes {mesh.axis_names}. "
                "Name the one along which programs differ."
            )
        other = [n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t != _AUTO]
        if other:
            raise ValueError(
                f"The axes {other} of `jax_mesh` are not automatic. Make the mesh with "
                "`AxisType.Auto`: the compiler divides the programs of a group."
            )

    @property
    def mpmd_dim(self) -> int:
        """The number of groups."""
        return self.jax_mesh.shape[self.mpmd_axis_name]

    @cached_property
    def unstack(self) -> list[Mesh]:
        """The mesh of each group, where the axis has size 1."""
        return [self.mpmd_submesh([rank]).jax_mesh for rank in range(self.mpmd_dim)]

    def mpmd_submesh(self, mpmd_idxs: Sequence[int]) -> "MpmdMesh":
        """The groups with these indices, in this order.

        Raises:
            ValueError: If there is no such group.
        """
        outside = [i for i in mpmd_idxs if not 0 <= i < self.mpmd_dim]
        if outside or not mpmd_idxs:
            raise ValueError(
                f"`mpmd_idxs` is {tuple(mpmd_idxs)}, and the mesh has the groups 0 to "
                f"{self.mpmd_dim - 1}. Name at least one of these."
            )
        mesh = self.jax_mesh
        devices = np.take(mesh.devices, list(mpmd_idxs), mesh.axis_names.index(self.mpmd_axis_name))
        return MpmdMesh(
            Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types), self.mpmd_axis_name
        )

    @cached_property
    def local_ranks(self) -> tuple[int, ...]:
        """The groups whose devices belong to this process.

        Raises:
            ValueError: If a group has devices of several processes.
        """
        found = []
        for rank, mesh in enumerate(self.unstack):
            processes = {device.process_index for device in mesh.devices.flat}
            if len(processes) > 1:
                raise ValueError(
                    f"Group {rank} of {self.mpmd_axis_name!r} has devices of the processes "
                    f"{sorted(processes)}. Lay the mesh out so that every group is in one process."
                )
            if processes == {jax.process_index()}:
                found.append(rank)
        return tuple(found)

    def process_of(self, rank: int) -> int:
        """The process that runs a group."""
        return self.unstack[rank].devices.flat[0].process_index


_AUTO = AxisType.Auto


@dataclass(frozen=True)
class MpmdSharding:
    """Where an array lives: whole on each of some groups, and how it is divided within them."""

    mpmd_mesh: MpmdMesh
    mpmd_idxs: tuple[int, ...]
    spec: PartitionSpec

    def of_rank(self, rank: int) -> NamedSharding:
        """On one group."""
        return NamedSharding(self.mpmd_mesh.unstack[rank], self.spec)

    @property
    def sharding(self) -> NamedSharding:
        """Over the devices of all its groups."""
        return NamedSharding(self.mpmd_mesh.mpmd_submesh(self.mpmd_idxs).jax_mesh, self.spec)


class MpmdArray:
    """An array that lives on some groups of a mesh, the same on each of them.

    A leaf of pytrees. Where one of its groups is in this process, `numpy.asarray` and the like
    give its numbers; `mpmd_to_spmd_reshard` makes a `jax.Array` of it.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        sharding: MpmdSharding,
        arrays: Mapping[int, Any],
        wait: Callable[[Any], Any] = jax.block_until_ready,
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.mpmd_sharding = sharding
        self._partially_addressable_arrays = OrderedDict(arrays)
        self._wait = wait

    @property
    def mpmd_idxs(self) -> tuple[int, ...]:
        """The groups it lives on."""
        return self.mpmd_sharding.mpmd_idxs

    @property
    def sharding(self) -> NamedSharding:
        """Over the devices of all its groups."""
        return self.mpmd_sharding.sharding

    @property
    def spec(self) -> PartitionSpec:
        return self.mpmd_sharding.spec

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=int))

    @property
    def is_addressable(self) -> bool:
        """Whether one of its groups is in this process."""
        return bool(self._partially_addressable_arrays)

    def on_rank(self, rank: int) -> jax.Array | None:
        """The array of a group, if it lives there and the group is in this process."""
        return self._partially_addressable_arrays.get(rank)

    def to_mpmd_local_array(self) -> jax.Array:
        """The array of its first group in this process.

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
        self._wait(list(self._partially_addressable_arrays.values()))
        return self

    def is_ready(self) -> bool:
        return all(array.is_ready() for array in self._partially_addressable_arrays.values())

    def delete(self) -> None:
        for array in self._partially_addressable_arrays.values():
            array.delete()

    def is_deleted(self) -> bool:
        return any(array.is_deleted() for array in self._partially_addressable_arrays.values())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self._ready(), dtype)

    def _ready(self) -> jax.Array:
        self.block_until_ready()
        return self.to_mpmd_local_array()

    def item(self) -> Any:
        return self._ready().item()

    def __float__(self) -> float:
        return float(self._ready())

    def __int__(self) -> int:
        return int(self._ready())

    def __bool__(self) -> bool:
        return bool(self._ready())

    def __format__(self, spec: str) -> str:
        return format(self._ready(), spec) if self.is_addressable else repr(self)

    def __repr__(self) -> str:
        return (
            f"MpmdArray(shape={self.shape}, dtype={np.dtype(self.dtype).name}, "
            f"mpmd_idxs={self.mpmd_idxs}, sharding={self.sharding})"
        )
