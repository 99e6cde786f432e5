"""Grouped matrix products: each group of rows is multiplied by the matrix of its group.

m rows, E groups, D embed, F width.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jaxtyping import Array, Float, Int

GroupedMatmul = Callable[..., Array]
"""`(rows [m, D], weights [E, D, F], group_sizes [E], sums=None) -> [m, F]`. Rows are sorted by
group. Results of rows after the last group are anything, also no numbers, and so are their
gradients; what these rows are, and the gradients of their results, changes nothing else. The
gradient of weights is added to `sums` [E, D, F], and the sum returned in its place."""


def ragged_dot(
    rows: Float[Array, "m D"],
    weights: Float[Array, "E D F"],
    group_sizes: Int[Array, " E"],
    sums: Float[Array, "E D F"] | None = None,
) -> Float[Array, "m F"]:
    """Runs XLA's grouped matrix product, on any device."""
    return _product(rows, with_gradients_added(weights, sums), group_sizes)


@jax.custom_vjp
def with_gradients_added(x: Array, sums: Array | None) -> Array:
    """Returns `x`, whose gradient is added to `sums`."""
    return x


with_gradients_added.defvjp(
    lambda x, sums: (x, sums),
    lambda sums, gradient: (gradient if sums is None else sums + gradient, None),
)


def _vmap_all(f: Callable) -> Callable:
    """Returns `f` with a batching rule that broadcasts unmapped arguments."""
    # JAX's `ragged_dot` can be vmapped over all of its arguments only.
    mapped = jax.custom_batching.custom_vmap(f)

    @mapped.def_vmap
    def rule(size: int, is_mapped: list[bool], *arguments: Array):
        every = (
            x if here else jnp.broadcast_to(x, (size, *x.shape))
            for x, here in zip(arguments, is_mapped, strict=True)
        )
        out = jax.vmap(f)(*every)
        return out, jax.tree.map(lambda _: True, out)

    return mapped


@_vmap_all
def _forward(rows: Array, weights: Array, group_sizes: Array) -> Array:
    return jax.lax.ragged_dot(rows, weights, group_sizes)


@_vmap_all
def _backward(rows: Array, weights: Array, group_sizes: Array, gradient: Array):
    def product(rows, weights):
        return jax.lax.ragged_dot(rows, weights, group_sizes)

    return jax.vjp(product, rows, weights)[1](gradient)


@jax.custom_vjp  # JAX cannot differentiate what `_vmap_all` returns
def _product(rows: Array, weights: Array, group_sizes: Array) -> Array:
    return _forward(rows, weights, group_sizes)


_product.defvjp(
    lambda *arguments: (_forward(*arguments), arguments),
    lambda arguments, gradient: (*_backward(*arguments, gradient), None),
)


def megablox(*, interpret: bool = False) -> GroupedMatmul:
    """Returns JAX's Pallas kernel for TPU, which skips rows without a group (arXiv 2211.15841)."""

    def product(rows, weights, group_sizes, *, transposed: bool):
        options = {"transpose_rhs": transposed, "interpret": interpret}
        return gmm(rows, weights, group_sizes, rows.dtype, _tiles, **options)

    @jax.custom_vjp
    def multiply(rows, weights, group_sizes, sums):
        return product(rows, weights, group_sizes, transposed=False)

    def backward(arguments, gradient):
        rows, weights, group_sizes, sums = arguments
        options = {"existing_out": sums, "interpret": interpret}
        tiles = _tiles if sums is None else _tiles_of_sums
        return (
            product(gradient, weights, group_sizes, transposed=True),
            tgmm(rows.T, gradient, group_sizes, weights.dtype, tiles, **options),
            None,
            None,
        )

    # Not the derivative of JAX, which has no sums.
    multiply.defvjp(lambda *arguments: (multiply(*arguments), arguments), backward)

    def kernel(rows, weights, group_sizes, sums=None):
        tile, _, _ = _tiles(rows.shape[0], rows.shape[1], weights.shape[2])
        padded = jnp.pad(rows, ((0, -rows.shape[0] % tile), (0, 0)))
        return multiply(padded, weights, group_sizes, sums)[: rows.shape[0]]

    return kernel


def _tiles(m: int, k: int, n: int) -> tuple[int, int, int]:
    """Returns MaxText's tile sizes: 512 rows by 1024 by 1024, or less for smaller dims."""
    return min(512, -(-m // 128) * 128), min(1024, k), min(1024, n)


def _tiles_of_sums(m: int, k: int, n: int) -> tuple[int, int, int]:
    """Returns tiles of half the depth: a core's vector memory, by default 16 MiB, has sums too."""
    rows, depth, columns = _tiles(m, k, n)
    return rows, min(512, depth), columns
