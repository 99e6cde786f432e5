"""Parameters that are sharded over the axis `fsdp`, and rows that are divided over devices."""

import math

import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import PyTree

from ..sharding import Rules

ROW_AXES = ("data", "fsdp")
"""Mesh axes that divide the rows of a microbatch."""

FSDP_RULES: Rules = (("fsdp", ("fsdp",)),)


def row_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes of `mesh` that divide the rows of a microbatch."""
    return tuple(axis for axis in ROW_AXES if mesh.shape.get(axis, 1) > 1)


def num_row_shards(mesh: Mesh) -> int:
    """Returns D, the number of devices that divide the rows of a microbatch."""
    return math.prod(mesh.shape[axis] for axis in row_axes(mesh))


def fsdp_axes(shape: tuple[int, ...], mesh: Mesh) -> tuple[str | None, ...]:
    """Returns the axis of each dim of a parameter: `fsdp` for the largest dim that it divides.

    Args:
        shape: The shape of the parameter.
        mesh: The mesh.

    Returns:
        [dims] "fsdp" or None.
    """
    size = mesh.shape.get("fsdp", 1)
    sizes = [n if size > 1 and n % size == 0 else 0 for n in shape]
    if not any(sizes):
        return (None,) * len(shape)
    largest = sizes.index(max(sizes))
    return tuple("fsdp" if i == largest else None for i in range(len(shape)))


def fsdp_spec(leaf: PyTree, mesh: Mesh, lead: tuple[str | None, ...] = ()) -> PartitionSpec:
    """Returns the spec of a stored parameter.

    Args:
        leaf: The parameter, with the dims of `lead` in front.
        mesh: The mesh.
        lead: The axes of dims in front of those of one layer.

    Returns:
        The spec.
    """
    return PartitionSpec(*lead, *fsdp_axes(jnp.shape(leaf)[len(lead) :], mesh))
