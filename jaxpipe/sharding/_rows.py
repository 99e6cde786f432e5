"""Rows of a batch where each device holds its own, and keys by which it draws those alone.

Inside a `jax.shard_map` over batch axes, which a pipeline may make manual, a stage sees the rows of
one device, and reductions over all rows of a microbatch use these functions. Outside they reduce
over nothing.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt, UInt32


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


Draw = Callable[[Array, tuple[int, ...]], Array]
"""`(key, shape) -> numbers`, such as `jax.random.uniform`."""


def local_draws(draw: Draw, key: Array, shape: tuple[int, ...]) -> Array:
    """Returns this device's rows of the numbers that `draw` draws for a whole microbatch.

    Numbers are thereby the same on any mesh. With JAX's default keys no device draws those of
    others.

    Args:
        draw: Draws an array of a shape by a key. A row depends on its place in dim 0 alone.
        key: [] a key of `jax.random.key`.
        shape: The shape of the rows of this device.

    Returns:
        [*shape] the numbers.

    Example:
        >>> local_draws(jax.random.uniform, jax.random.key(0), (4, 8)).shape
        (4, 8)
    """
    axes = manual_batch_axes()
    return draw_own(draw, key, shape, 0, axes) if axes else draw(key, shape)


def draw_own(
    draw: Draw, key: Array, shape: tuple[int, ...], dim: int, axes: tuple[str, ...]
) -> Array:
    """Returns the rows of this device, along a dim, of what all devices over `axes` draw.

    Args:
        draw: Draws an array of a shape by a key.
        key: [] a key of `jax.random.key`.
        shape: The shape of what is drawn for this device.
        dim: The dim of rows.
        axes: Manual axes, at least one.

    Returns:
        [*shape] the numbers. Those of other rows are drawn too if the key is not of
        `threefry2x32`, or if rows are not the first dim.
    """
    if dim == 0 and math.prod(shape) < 2**32 and _draws_by_place(key):
        index = lax.axis_index(axes).astype(jnp.uint32)
        data = jnp.concatenate([jax.random.key_data(key), index[None]])
        return draw(jax.random.wrap_key_data(data, impl=_OF_OWN_ROWS), shape)
    return own_part(lambda whole: draw(key, whole), shape, dim, axes)


def _draws_by_place(key: Array) -> bool:
    """Returns whether a number depends on its place alone, and not on the shape that is drawn."""
    is_threefry = str(jax.random.key_impl(key)) == "threefry2x32"
    return is_threefry and jax.config.jax_threefry_partitionable  # pyright: ignore


def _random_bits(
    data: UInt32[Array, "3"], bit_width: int, shape: tuple[int, ...]
) -> UInt[Array, "..."]:
    """Returns the bits at the places behind those of the rows before, as `jax.random.bits` does.

    A place is a number of 64 bits, high and low: https://docs.jax.dev/en/latest/jep/263-prng.html
    """
    first, second, index = data
    high, low = _product(index, math.prod(shape))
    places = jnp.zeros(shape, jnp.uint32)
    for dim in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[dim + 1 :]))
        places += lax.broadcasted_iota(jnp.uint32, shape, dim) * stride
    lows = low + places
    highs = high + (lows < places).astype(jnp.uint32)
    one, other = jax.extend.random.threefry2x32_p.bind(
        *jnp.broadcast_arrays(first, second, highs, lows)
    )
    if bit_width == 64:
        return one.astype("uint64") << 32 | other.astype("uint64")
    return (one ^ other).astype(f"uint{bit_width}")


def _product(index: UInt32[Array, ""], size: int) -> tuple[Array, Array]:
    """Returns the high and the low 32 bits of a product."""
    half, mask = jnp.uint32(16), jnp.uint32(0xFFFF)
    by_low, by_high = jnp.uint32(size & 0xFFFF), jnp.uint32(size >> 16)
    low, high = index & mask, index >> half
    middle = high * by_low + (low * by_low >> half)
    last = low * by_high + (middle & mask)
    return high * by_high + (middle >> half) + (last >> half), index * jnp.uint32(size)


def _fold_in(data: UInt32[Array, "3"], number: Any) -> UInt32[Array, "3"]:
    folded = jax.random.fold_in(jax.random.wrap_key_data(data[:2], impl="threefry2x32"), number)
    return jnp.concatenate([jax.random.key_data(folded), data[2:]])


def _split(data: UInt32[Array, "3"], shape: tuple[int, ...]) -> UInt32[Array, "... 3"]:
    keys = jax.random.split(jax.random.wrap_key_data(data[:2], impl="threefry2x32"), shape)
    index = jnp.broadcast_to(data[2:], (*shape, 1))
    return jnp.concatenate([jax.random.key_data(keys), index], axis=-1)


def _seed(seed: Any) -> UInt32[Array, "3"]:
    raise NotImplementedError("Keys of own rows are made by `draw_own`.")


_OF_OWN_ROWS = jax.extend.random.define_prng_impl(
    key_shape=(3,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="threefry2x32_of_own_rows",
    tag="own_fry",
)
