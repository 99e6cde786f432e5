"""Grouped matrix products on GPUs, as kernels in Pallas's dialect of Triton.

XLA:GPU computes `ragged_dot` as a product over all experts, of rows that are zero but for one.
JAX's own grouped products for GPUs (`jax.experimental.pallas.ops.gpu`) run on one generation each,
and they and tokamax's read facts from the devices of the process, which are others than those that
a program is compiled for ahead of time.

The rows of a group are cut into tiles, so a tile has one matrix. How many tiles a group has is a
value of the program; the number of all tiles has a bound that depends on shapes alone.

m rows, E groups, K rows and N columns of a matrix, t tiles.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from ..._compat import import_pallas_triton
from ._grouped_matmul import GroupedMatmul

_BLOCK = 128
_DEPTH_BYTES = 64
_WARPS = {"num_warps": 4, "num_stages": 4}
"""Sizes of blocks that tokamax's measurements on H100 prefer for products of this kind: 128 by 128
results, summed in steps of 32 bfloat16."""


def pallas_gpu_grouped_matmul(*, interpret: bool = False) -> GroupedMatmul:
    """Returns a Pallas kernel for GPUs with the contract of `ragged_dot`.

    Its cost grows with the number of rows in groups, not with the number of groups. It multiplies
    in the dtype of its arguments and adds in float32. Gale et al., 2022, arXiv 2211.15841.
    """

    @jax.custom_vjp
    def multiply(rows, weights, group_sizes, sums):
        return _by_group(rows, weights, group_sizes, interpret=interpret)

    def backward(arguments, gradient):
        rows, weights, group_sizes, sums = arguments
        return (
            _by_group(gradient, weights, group_sizes, transposed=True, interpret=interpret),
            _outer(rows, gradient, group_sizes, sums, interpret=interpret),
            None,
            None,
        )

    multiply.defvjp(lambda *arguments: (multiply(*arguments), arguments), backward)
    return lambda rows, weights, group_sizes, sums=None: multiply(rows, weights, group_sizes, sums)


class _Tiles(NamedTuple):
    """The group of every tile, its first row, and the end of the rows of its group, each [t].

    Rows after the last group are those of group E. Tiles that no group needs begin at row m.
    """

    group: Int[Array, " t"]
    start: Int[Array, " t"]
    end: Int[Array, " t"]


def _tiles(group_sizes: Int[Array, " E"], num_rows: int, tile: int) -> _Tiles:
    """Assigns tiles of rows to groups, in order."""
    sizes = group_sizes.astype(jnp.int32)
    sizes = jnp.append(sizes, num_rows - jnp.sum(sizes, dtype=jnp.int32))
    ends, counts = jnp.cumsum(sizes), (sizes + tile - 1) // tile
    tile_ends = jnp.cumsum(counts)
    index = jnp.arange(num_rows // tile + sizes.size, dtype=jnp.int32)
    group = jnp.sum(index[:, None] >= tile_ends, axis=1, dtype=jnp.int32)
    here = jnp.minimum(group, sizes.size - 1)
    start = (ends - sizes)[here] + (index - (tile_ends - counts)[here]) * tile
    return _Tiles(here, jnp.where(group < sizes.size, start, num_rows), ends[here])


def _by_group(
    rows: Float[Array, "m K"],
    weights: Float[Array, "E D F"],
    group_sizes: Int[Array, " E"],
    *,
    transposed: bool = False,
    interpret: bool,
) -> Float[Array, "m N"]:
    """Multiplies every row with the matrix of its group; `transposed`: with its transpose."""
    num_rows = rows.shape[0]
    width = weights.shape[1] if transposed else weights.shape[2]
    tile = min(_BLOCK, max(16, pl.next_power_of_2(pl.cdiv(num_rows, weights.shape[0]))))
    block = _block(width)
    tiles = _tiles(group_sizes, num_rows, tile)
    kernel = partial(_by_group_kernel, num_blocks=pl.cdiv(width, block), transposed=transposed)
    return _call(
        partial(kernel, step=_depth(rows), num_groups=weights.shape[0], tile=tile, block=block),
        jax.ShapeDtypeStruct((num_rows, width), rows.dtype),
        (tiles.group.size * pl.cdiv(width, block),),
        "jaxpipe_gmm_transposed" if transposed else "jaxpipe_gmm",
        interpret,
    )(*tiles, rows, weights)


def _by_group_kernel(
    group_ref, start_ref, end_ref, rows_ref, weights_ref, out_ref,
    *, step: int, num_groups: int, num_blocks: int, tile: int, block: int, transposed: bool,
):  # fmt: skip
    """Computes a tile of rows by a block of columns; those of one tile run one after the other."""
    index = pl.program_id(0)
    t, column = lax.div(index, num_blocks), lax.rem(index, num_blocks) * block
    group, start, end = group_ref[t], start_ref[t], end_ref[t]
    depth, width = rows_ref.shape[1], out_ref.shape[1]
    in_group = start + lax.iota(jnp.int32, tile) < end

    def add_step(i, total):
        left = _load(rows_ref, (start, tile, in_group), (i * step, step, depth))
        along, across = (i * step, step, depth), (column, block, width)
        spans = (across, along) if transposed else (along, across)
        right = _load(weights_ref, *spans, group=group)
        return total + _dot(left, right, (1, 1 if transposed else 0))

    # Rows without a group have no products: zeros are stored.
    steps = jnp.where(group < num_groups, jnp.int32(pl.cdiv(depth, step)), jnp.int32(0))
    total = lax.fori_loop(0, steps, add_step, jnp.zeros((tile, block), jnp.float32))

    _store(out_ref, total, (start, tile, in_group), (column, block, width))


def _outer(
    rows: Float[Array, "m K"],
    gradient: Float[Array, "m N"],
    group_sizes: Int[Array, " E"],
    sums: Float[Array, "E K N"] | None = None,
    *,
    interpret: bool,
) -> Float[Array, "E K N"]:
    """Multiplies the transposed rows of every group with its gradients, and adds them to `sums`."""
    num_groups, depth, width = group_sizes.size, rows.shape[1], gradient.shape[1]
    ends = jnp.cumsum(group_sizes.astype(jnp.int32))
    blocks = _block(depth), _block(width)
    counts = pl.cdiv(depth, blocks[0]), pl.cdiv(width, blocks[1])
    before = () if sums is None else (sums,)
    return _call(
        partial(_outer_kernel, step=_depth(rows), blocks=blocks, counts=counts),
        jax.ShapeDtypeStruct((num_groups, depth, width), rows.dtype),
        (num_groups * counts[0] * counts[1],),
        "jaxpipe_gmm_outer",
        interpret,
        aliases={2: 0} if before else {},
    )(ends - group_sizes.astype(jnp.int32), ends, *before, rows, gradient)


def _outer_kernel(
    start_ref, end_ref, *refs, step: int, blocks: tuple[int, int], counts: tuple[int, int],
):  # fmt: skip
    """Computes a block of the matrix of one group."""
    *sums_ref, rows_ref, gradient_ref, out_ref = refs
    index = pl.program_id(0)
    group, within = lax.div(index, counts[0] * counts[1]), lax.rem(index, counts[0] * counts[1])
    row, column = lax.div(within, counts[1]) * blocks[0], lax.rem(within, counts[1]) * blocks[1]
    start, end = start_ref[group], end_ref[group]
    across = (row, blocks[0], rows_ref.shape[1]), (column, blocks[1], gradient_ref.shape[1])

    def add_step(i, total):
        first = start + i * step
        in_group = first + lax.iota(jnp.int32, step) < end
        left = _load(rows_ref, (first, step, in_group), across[0])
        right = _load(gradient_ref, (first, step, in_group), across[1])
        return total + _dot(left, right, (0, 0))

    steps = lax.div(end - start + step - 1, step)
    total = lax.fori_loop(0, steps, add_step, jnp.zeros(blocks, jnp.float32))
    for ref in sums_ref:
        total += _load(ref, *across, group=group).astype(jnp.float32)
    _store(out_ref, total, *across, group=group)


def _call(
    kernel: Any,
    out: jax.ShapeDtypeStruct,
    grid: tuple,
    name: str,
    interpret: bool,
    aliases: dict[int, int] | None = None,
) -> Any:
    # Imported there: other devices than GPUs do not need it.
    params = None if interpret else import_pallas_triton().CompilerParams(**_WARPS)
    options = {"grid": grid, "name": name, "interpret": interpret, "compiler_params": params}
    return pl.pallas_call(kernel, out, input_output_aliases=aliases or {}, **options)


def _block(size: int) -> int:
    """Returns the size of blocks of `size` columns: that which leaves least of a block empty."""
    sizes = (_BLOCK, _BLOCK // 2) if size > _BLOCK // 2 else (max(16, pl.next_power_of_2(size)),)
    return min(sizes, key=lambda block: pl.cdiv(size, block) * block)


def _depth(rows: Array) -> int:
    """Returns the number of terms of a sum that one step adds."""
    return _DEPTH_BYTES // rows.dtype.itemsize


def _block_of(rows: tuple, columns: tuple, group: Any) -> tuple[tuple, Array | None]:
    """Returns the index of a block, and which of its values exist; None: all."""
    spans = [pl.ds(start, size) for start, size, _ in (rows, columns)]
    shape, mask = (rows[1], columns[1]), None
    for dim, (start, size, exists) in enumerate((rows, columns)):
        if isinstance(exists, int):
            if exists % size == 0:
                continue
            exists = start + lax.iota(jnp.int32, size) < exists
        along = jnp.broadcast_to(jnp.expand_dims(exists, 1 - dim), shape)
        mask = along if mask is None else mask & along
    return (*(() if group is None else (group,)), *spans), mask


def _load(ref: Any, rows: tuple, columns: tuple, group: Any = None) -> Array:
    """Loads a block, with zeros where it has no values."""
    index, mask = _block_of(rows, columns, group)
    other = None if mask is None else 0.0
    return import_pallas_triton().load(ref.at[index], mask=mask, other=other)


def _store(ref: Any, values: Array, rows: tuple, columns: tuple, group: Any = None) -> None:
    """Stores a block, but for what the matrix does not have; arguments are those of `_load`."""
    index, mask = _block_of(rows, columns, group)
    import_pallas_triton().store(ref.at[index], values.astype(ref.dtype), mask=mask)


def _dot(left: Array, right: Array, contracted: tuple[int, int]) -> Array:
    dims = ((contracted[:1], contracted[1:]), ((), ()))
    return lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)
