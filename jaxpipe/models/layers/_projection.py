"""Multiplies activations by a weight, in the dtype of the activations or in FP8.

FP8 is Micikevicius et al., 2022, arXiv 2209.05433: e4m3 for activations and weights, e5m2 for
gradients. Scales are computed from the current values, so they need no state. Sums are float32.

| product                        | summed over   | scales                                          |
|--------------------------------|---------------|-------------------------------------------------|
| y = x w                        | inputs        | of x per token, of w per output                 |
| dx = (dy, scaled as w) w       | outputs       | of dy per token                                 |
| dw = x (dy, scaled as x)       | tokens        | of dy per output, over all tokens of all devices|

So y and dx of a token depend on no other token, and a device with some rows of a microbatch
computes the same values as a device with all of them. Only the scale of the last product needs all
rows: a `pmax` over the axes that shard them. The backward pass stores x as e4m3, and w unrounded:
rounding w again is cheap, and engines recognize an unchanged weight and store no copy of it.

A scale is a power of two. Multiplication by it is exact, so the order of operations does not
matter. It costs at most a factor of two of range.

b sequences, T tokens; a weight maps dims `in` to dims `out`, heads and channels for instance.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ...sharding import max_over_rows

Projection = Callable[[Float[Array, "b T *ins"], Float[Array, "*ins_and_outs"]], Array]
"""`(x [b, T, *in], w [*in, *out]) -> [b, T, *out]`, in the dtype of x."""

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
_TOKENS = (0, 1)


def projection(x: Float[Array, "b T *ins"], w: Float[Array, "*ins_and_outs"]) -> Array:
    """Returns the product of `x` and a weight [*in, *out] in the dtype of `x`."""
    return jnp.tensordot(x, w.astype(x.dtype), axes=x.ndim - len(_TOKENS))


def fp8_projection(x: Float[Array, "b T *ins"], w: Float[Array, "*ins_and_outs"]) -> Array:
    """Returns the product of `x` and a weight in FP8; its derivatives are computed in FP8 too."""
    return _fp8(x, w.astype(x.dtype))


PROJECTIONS: dict[str, Projection] = {"": projection, "fp8": fp8_projection}
"""Projections by the value of MaxText's `quantization`."""


class Scaled(NamedTuple):
    """Represents `values * scale` in FP8; the dims that share a scale have size 1 in `scale`."""

    values: Array
    scale: Array


@jax.custom_vjp
def _fp8(x: Array, w: Array) -> Array:
    return _forward(x, w)[0]


def _forward(x: Array, w: Array) -> tuple[Array, tuple[Scaled, Array]]:
    ins = range(x.ndim - len(_TOKENS))
    qx = quantize(x, FORWARD, over=range(len(_TOKENS), x.ndim))
    qw = quantize(w, FORWARD, over=ins)
    y = _dot(qx.values, qw.values, range(len(_TOKENS), x.ndim), ins)
    y *= _per_token(qx, y.ndim) * lax.squeeze(qw.scale, tuple(ins))
    return y.astype(x.dtype), (qx, w)


def _backward(residuals: tuple[Scaled, Array], dy: Array) -> tuple[Array, Array]:
    qx, w = residuals
    num_tokens, num_ins = len(_TOKENS), qx.values.ndim - len(_TOKENS)
    qw = quantize(w, FORWARD, over=range(num_ins))
    dy32 = dy.astype(jnp.float32)

    output_scales = lax.squeeze(qw.scale, tuple(range(num_ins)))
    g = quantize(dy32 * output_scales, BACKWARD, over=range(num_tokens, dy.ndim))
    dx = _dot(g.values, qw.values, range(num_tokens, dy.ndim), range(num_ins, qw.values.ndim))
    dx *= _per_token(g, dx.ndim)

    g = quantize(dy32 * _per_token(qx, dy.ndim), BACKWARD, over=_TOKENS, largest=max_over_rows)
    dw = _dot(qx.values, g.values, _TOKENS, _TOKENS) * lax.squeeze(g.scale, _TOKENS)
    return dx.astype(dy.dtype), dw.astype(dy.dtype)


_fp8.defvjp(_forward, _backward)


def quantize(
    x: Float[Array, "..."],
    dtype: Any,
    *,
    over: Sequence[int],
    largest: Callable[[Array], Array] = lambda x: x,
) -> Scaled:
    """Converts `x` to FP8, with the smallest power of two as scale for which no value overflows.

    `largest` combines the largest magnitude with that of other devices, such as by a `pmax`.
    """
    x32 = x.astype(jnp.float32)
    magnitude = largest(jnp.max(jnp.abs(x32), axis=tuple(over), keepdims=True))
    _, exponent = jnp.frexp(magnitude / float(jnp.finfo(dtype).max))
    # Limited to exponents whose inverse is a normal float32.
    scale = jnp.ldexp(jnp.float32(1), jnp.clip(exponent, -120, 120))
    return Scaled((x32 / scale).astype(dtype), scale)


def _per_token(x: Scaled, ndim: int) -> Array:
    """Returns the scales of `x` as [b, T, 1, ...] with `ndim` dims."""
    return x.scale.reshape(*x.scale.shape[: len(_TOKENS)], *[1] * (ndim - len(_TOKENS)))


def _dot(x: Array, y: Array, x_dims: Sequence[int], y_dims: Sequence[int]) -> Array:
    dims = ((tuple(x_dims), tuple(y_dims)), ((), ()))
    return lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)
