"""Layouts of arrays in memory."""

import jax
from jax.experimental.layout import Layout, with_layout_constraint


def row_major(x: jax.Array) -> jax.Array:
    """Constrains an array to row-major layout.

    XLA's partitioner gathers an array that it divides before such a constraint: where there are
    `partitioned_axes`, apply it to the shard of every device.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def partitioned_axes() -> frozenset[str]:
    """Returns the mesh axes over which XLA's partitioner may divide arrays here."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = (axis for axis in mesh.axis_names if mesh.shape[axis] > 1)
    return frozenset(axes) - frozenset(mesh.manual_axes)
