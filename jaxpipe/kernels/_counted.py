"""Attention as an equation of its own, in programs that are counted for devices that are absent.

A machine without the devices cannot trace every kernel (cuDNN's asks which version there is), and
no program of a kernel says what it computes: blocks that a mask skips are in it. A planner traces
the equation, which has what a flash kernel stores for its backward: queries, keys, values, the
result, and a sum in float32 for each query.

b sequences, T tokens, H query heads, K key and value heads, C channels of a query and key head, V
of a value head.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching
from jaxtyping import Array

from ..sharding import match_varying_axes
from ._selection import AttentionPlan

ATTENTION = Primitive("attention")
"""The equation of a forward, of queries, keys and values; its parameter `plan` has the rest."""
_BACKWARD = Primitive("attention_backward")

for _primitive in (ATTENTION, _BACKWARD):
    _primitive.multiple_results = True


@ATTENTION.def_abstract_eval
def _(q: Any, k: Any, v: Any, *others: Any, plan: AttentionPlan) -> list[ShapedArray]:
    del k, others, plan
    b, T, H, _ = q.shape
    return [ShapedArray((b, T, H, v.shape[3]), q.dtype), ShapedArray((b, H, T), jnp.float32)]


@_BACKWARD.def_abstract_eval
def _(*arrays: Any, count: int) -> list[ShapedArray]:
    return [ShapedArray(x.shape, x.dtype) for x in arrays[:count]]


def _merge_rows(primitive: Primitive, arrays: Any, dims: Any, **params: Any) -> Any:
    """Runs attention of rows under a `jax.vmap` as that of all their rows."""
    sized = zip(arrays, dims, strict=True)
    size = next(x.shape[dim] for x, dim in sized if dim is not None)
    rows = [batching.bdim_at_front(x, dim, size) for x, dim in zip(arrays, dims, strict=True)]
    outs = primitive.bind(*(x.reshape(-1, *x.shape[2:]) for x in rows), **params)
    return [x.reshape(size, -1, *x.shape[1:]) for x in outs], [0] * len(outs)


for _primitive in (ATTENTION, _BACKWARD):
    batching.primitive_batchers[_primitive] = partial(_merge_rows, _primitive)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def counted_attention(
    plan: AttentionPlan, q: Array, k: Array, v: Array, segment_ids: Any, sinks: Any
) -> jax.Array:
    """Returns a result that has the shape of attention's, in a program that is never run."""
    return _forward(plan, q, k, v, segment_ids, sinks)[0]


def _forward(
    plan: AttentionPlan, q: Array, k: Array, v: Array, segment_ids: Any, sinks: Any
) -> tuple[jax.Array, Any]:
    out, sums = match_varying_axes((q, k, v), ATTENTION.bind(q, k, v, plan=plan))
    return out, (q, k, v, segment_ids, sinks, out, sums)


def _backward(plan: AttentionPlan, residuals: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    del plan
    q, k, v, segment_ids, sinks, out, sums = residuals
    grads = match_varying_axes((q, k, v), _BACKWARD.bind(q, k, v, out, sums, cotangent, count=3))
    no_grad = None if segment_ids is None else jnp.zeros(segment_ids.shape, jax.dtypes.float0)
    return *grads, no_grad, None if sinks is None else jnp.zeros_like(sinks)


counted_attention.defvjp(_forward, _backward)
