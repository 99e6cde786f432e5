"""Rows of a batch where each device holds its own: inside a `jax.shard_map` over batch axes.

A pipeline may make the axes that split the batch manual. A stage then sees the rows of one device,
and reductions over all rows of a microbatch use these functions. Outside they reduce over
nothing.
"""

from collections.abc import Callable

import jax
from jax import lax


def manual_batch_axes() -> tuple[str, ...]:
    """Returns the manual axes that split the batch, those beside `stage`, in mesh order."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(a for a in mesh.axis_names if a in mesh.manual_axes and a != "stage")


def sum_over_rows(x: jax.Array) -> jax.Array:
    """Sums what each device has summed over its own rows of a microbatch.

    Args:
        x: [...] the sum over the rows of this device.

    Returns:
        [...] the sum over all rows. Outside `jax.shard_map` it is `x`.
    """
    axes = manual_batch_axes()
    return lax.psum(x, axes) if axes else x


def max_over_rows(x: jax.Array) -> jax.Array:
    """Returns the largest of the values that devices have for their own rows.

    Args:
        x: [...] the maximum over the rows of this device.

    Returns:
        [...] the maximum over all rows. Outside `jax.shard_map` it is `x`.
    """
    axes = manual_batch_axes()
    return lax.pmax(x, axes) if axes else x


def local_rows(make: Callable[[tuple[int, ...]], jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """Returns this device's rows of `make(shape of the microbatch)`.

    Random numbers are thereby the same on any mesh; `local_draws` draws no others.

    Args:
        make: Returns an array of a shape, such as random numbers of one key.
        shape: The shape of the rows of this device.

    Returns:
        [*shape] an array.
    """
    axes = manual_batch_axes()
    return own_part(make, shape, 0, axes) if axes else make(shape)


def own_part(
    make: Callable[[tuple[int, ...]], jax.Array],
    shape: tuple[int, ...],
    dim: int,
    axes: tuple[str, ...],
) -> jax.Array:
    """Returns this device's part, along a dim, of what `make` returns for all devices over axes."""
    rows, whole = shape[dim], list(shape)
    whole[dim] *= lax.axis_size(axes)
    first = lax.axis_index(axes) * rows
    return lax.dynamic_slice_in_dim(make(tuple(whole)), first, rows, dim)
