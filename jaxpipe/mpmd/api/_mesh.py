"""Defines a mesh whose groups run different programs, and the shardings of arrays on it."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ...sharding.specs import axes_of, without_axes


@dataclass(frozen=True)
class MpmdMesh:
    """A mesh of devices, divided along one axis into groups that run different programs.

    Args:
        jax_mesh: The mesh of all devices. Its other axes shard arrays within a group. Explicit
            axes, the default of `jax.make_mesh`, become automatic within a group: the compiler
            partitions the programs of a group.
        mpmd_axis_name: The axis whose indices are the groups. A rank is an index along it.

    Raises:
        ValueError: If `jax_mesh` has no axis of this name, or an axis is manual.

    Example:
        >>> import jax
        >>> from jaxpipe.sharding import make_mesh
        >>> mesh = make_mesh({"stage": 2}, devices=jax.devices()[:2])
        >>> MpmdMesh(mesh, "stage").mpmd_dim
        2
    """

    jax_mesh: Mesh
    mpmd_axis_name: str

    mesh_stack: ClassVar[list["MpmdMesh"]] = []
    """The meshes whose contexts are entered, the innermost last. No function reads it."""

    def __post_init__(self) -> None:
        mesh, name = self.jax_mesh, self.mpmd_axis_name
        if name not in mesh.axis_names:
            raise ValueError(
                f"`mpmd_axis_name` is {name!r}, and the mesh has the axes {mesh.axis_names}. "
                "Name the one along which programs differ."
            )
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        manual = [name for name, kind in kinds if kind == AxisType.Manual]
        if manual:
            raise ValueError(
                f"The axes {manual} of `jax_mesh` are manual, as inside a `jax.shard_map`. Make "
                "the mesh outside of it."
            )

    def __enter__(self) -> "MpmdMesh":
        """Returns the mesh and adds it to `mesh_stack`. A compiled function stores its own mesh."""
        self.mesh_stack.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        del exception
        self.mesh_stack.pop()

    @property
    def mpmd_dim(self) -> int:
        """Returns the number of groups."""
        return self.jax_mesh.shape[self.mpmd_axis_name]

    @property
    def mpmd_axis(self) -> int:
        """Returns the dim of `jax_mesh.devices` whose indices are the groups."""
        return self.jax_mesh.axis_names.index(self.mpmd_axis_name)

    @property
    def has_explicit_axes(self) -> bool:
        """Returns whether an axis of `jax_mesh` is explicit."""
        return AxisType.Explicit in self.jax_mesh.axis_types

    @cached_property
    def auto_mesh(self) -> Mesh:
        """Returns the mesh of all devices with automatic axes."""
        return Mesh(self.jax_mesh.devices, self.jax_mesh.axis_names)

    @cached_property
    def unstack(self) -> list[Mesh]:
        """Returns the mesh of each group. The axis of the groups has size 1 in it."""
        return [self.mpmd_submesh([rank]).jax_mesh for rank in range(self.mpmd_dim)]

    def lowering_mesh(self) -> Mesh:
        """Returns the mesh of the first group of this process, or of group 0 if it has none."""
        return self.unstack[(*self.local_ranks, 0)[0]]

    @cached_property
    def device_coords(self) -> Mapping[Any, tuple[int, ...]]:
        """Maps each device to its index in `jax_mesh.devices`, one integer for each dim."""
        return {device: index for index, device in np.ndenumerate(self.jax_mesh.devices)}

    @cached_property
    def device_mpmd_idx(self) -> Mapping[Any, int]:
        """Maps each device to the index of its group."""
        return {device: index[self.mpmd_axis] for device, index in self.device_coords.items()}

    @cached_property
    def mpmd_idx_for_mesh(self) -> Mapping[Mesh, int]:
        """Maps the mesh of each group to the index of the group."""
        return {mesh: rank for rank, mesh in enumerate(self.unstack)}

    @property
    def my_mpmd_axis_index(self) -> int:
        """Returns the index of the only group whose devices belong to this process."""
        if len(self.local_ranks) != 1:
            raise ValueError(
                f"`my_mpmd_axis_index` needs exactly one group in this process, and process "
                f"{jax.process_index()} has the groups {self.local_ranks}. Use `local_ranks`."
            )
        return self.local_ranks[0]

    @property
    def my_mpmd_group_mesh(self) -> Mesh:
        """Returns the mesh of the only group whose devices belong to this process."""
        return self.unstack[self.my_mpmd_axis_index]

    def mpmd_submesh(self, mpmd_indices: Sequence[int]) -> "MpmdMesh":
        """Returns a mesh of the groups with these indices, in the given order."""
        outside = [i for i in mpmd_indices if not 0 <= i < self.mpmd_dim]
        if outside or not mpmd_indices:
            raise ValueError(
                f"`mpmd_indices` is {tuple(mpmd_indices)}, and the mesh has the groups 0 to "
                f"{self.mpmd_dim - 1}. Name at least one of these."
            )
        devices = np.take(self.jax_mesh.devices, list(mpmd_indices), self.mpmd_axis)
        return MpmdMesh(Mesh(devices, self.jax_mesh.axis_names), self.mpmd_axis_name)

    @cached_property
    def local_ranks(self) -> tuple[int, ...]:
        """Returns the indices of the groups whose devices belong to this process."""
        ranks = []
        for rank, mesh in enumerate(self.unstack):
            processes = {device.process_index for device in mesh.devices.flat}
            if len(processes) > 1:
                raise ValueError(
                    f"Group {rank} of {self.mpmd_axis_name!r} has devices of the processes "
                    f"{sorted(processes)}. Lay the mesh out so that every group is in one process."
                )
            if processes == {jax.process_index()}:
                ranks.append(rank)
        return tuple(ranks)

    def process_of(self, rank: int) -> int:
        """Returns the index of the process whose devices form group `rank`."""
        return self.unstack[rank].devices.flat[0].process_index


@dataclass(frozen=True)
class MpmdSharding:
    """The groups that hold an array, each the whole of it, and its sharding within a group.

    Args:
        mpmd_mesh: The mesh with its groups.
        mesh_ids: The indices of the groups that hold the array. Empty for an argument that no group
            reads.
        spec: The partition spec within a group. The axis of the groups is dropped from it, as this
            axis has size 1 within a group.
        memory_kind: The kind of memory of the devices, or None for the default memory.

    Raises:
        ValueError: If `memory_kind` is not the default memory of the devices, or `spec` has
            `unreduced` or `reduced` axes.
    """

    mpmd_mesh: MpmdMesh
    mesh_ids: Collection[int]
    spec: PartitionSpec
    memory_kind: str | None = None

    def __post_init__(self) -> None:
        check_memory_kind(self.memory_kind, self.mpmd_mesh.jax_mesh, "`MpmdSharding`")
        check_reduced(self.spec, "`MpmdSharding`")
        object.__setattr__(self, "mesh_ids", frozenset(self.mesh_ids))
        within = without_axes(self.spec, (self.mpmd_mesh.mpmd_axis_name,))
        object.__setattr__(self, "spec", within)

    @property
    def mpmd_idxs(self) -> tuple[int, ...]:
        """Returns the indices of the groups in ascending order."""
        return tuple(sorted(self.mesh_ids))

    def of_rank(self, rank: int) -> NamedSharding:
        """Returns the sharding over the devices of group `rank`."""
        return NamedSharding(self.mpmd_mesh.unstack[rank], self.spec)

    @property
    def sharding(self) -> NamedSharding:
        """Returns the sharding over the devices of all groups that hold the array."""
        return NamedSharding(self.mpmd_mesh.mpmd_submesh(self.mpmd_idxs).jax_mesh, self.spec)


def no_ambient_mesh() -> AbstractContextManager[Any]:
    """Returns a context in which the mesh of the caller's `jax.set_mesh` is not set.

    The caller's mesh has the devices of all groups. While it is set, JAX refuses arrays on the
    devices of one group and refuses to trace programs for one group.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    return jax.set_mesh(Mesh(np.empty((), object), ()))


def check_reduced(spec: PartitionSpec, what: str) -> None:
    """Checks that a spec has no `unreduced` or `reduced` axes, as JAX allows for explicit axes."""
    if axes := sorted(spec.unreduced | spec.reduced):
        raise ValueError(f"{what} has the spec {spec}. {DELAYED.format(axis=axes[0])}")


SUM_ONCE = (
    "let each device keep its own: "
    "`jax.vmap(jax.value_and_grad(loss), (None, 0), spmd_axis_name={axis!r})`, constrained to "
    "`PartitionSpec({axis!r})`, and sum the first dim of what the loop over microbatches returns."
)

DELAYED = (
    "Axes are automatic within a group, and JAX has `unreduced` and `reduced` for explicit axes "
    "only. To reduce gradients once a step, "
) + SUM_ONCE


def check_memory_kind(kind: str | None, mesh: Mesh, what: str) -> None:
    """Checks that a memory kind is the default of the devices. Other kinds are not supported."""
    if kind is None:  # devices that are only planned for have no memories
        return
    default = mesh.devices.flat[0].default_memory().kind
    if kind != default:
        raise ValueError(
            f"{what} has memory_kind={kind!r}. Arrays of groups live in the default memory of "
            f"their devices, {default!r}: leave `memory_kind` out, and move arrays to other "
            "memory with `jax.device_put` between steps."
        )


def check_spec(spec: PartitionSpec, mpmd_axis: str, what: str) -> None:
    """Checks that a spec does not use the mesh axis that separates the groups."""
    if mpmd_axis in axes_of(spec):
        raise ValueError(
            f"{what} has the spec {spec}, over {mpmd_axis!r}. Along this axis groups run programs "
            "of their own, so no array is divided over it. Name other axes."
        )
