"""`jaxpipe.attention`: the attention of a layer, by the kernel that the devices have.

b sequences, T tokens, H query heads, K key and value heads, C channels of a query and key head, V
of a value head.
"""

import logging
import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float, Int

from .. import _compat
from ..sharding import ROW_AXES, automatic_axes
from ..sharding.specs import axes_of_dim
from ._context import Kernel, on_slices
from ._counted import counted_attention
from ._dot_product import dot_product_kernel
from ._gpu import cudnn_kernel, pallas_kernel
from ._on_mesh import GRANULARITY, MeshSpecs, attention_on_mesh
from ._scores import Scores
from ._selection import AttentionPlan, check_stored_scores
from ._splash import splash_kernel
from ._traces import axes_of_vmap, trace_is_read_for, traced_widest_head

# Attention of whole sequences that stores its scores, which XLA can divide by itself.
_stored = partial(on_slices, dot_product_kernel, axis=None, size=1, granularity=1)

_log = logging.getLogger("jaxpipe")

_LENGTH_AXIS, _HEAD_AXIS = "context", "tensor"


def attention(
    q: Float[Array, "b T H C"],
    k: Float[Array, "b T K C"],
    v: Float[Array, "b T K V"],
    *,
    segment_ids: Int[Array, "b T"] | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    scale: float | None = None,
    kernel: Literal["auto", "splash", "cudnn", "pallas", "dot_product"] = "auto",
) -> Float[Array, "b T H V"]:
    """Runs self-attention by the flash kernel of the devices, also on sequences that are split.

    On the mesh in context rows stay on the devices that have them, heads are split over its axis
    `tensor`, and sequences over `context`: each device then computes its share of the queries, and
    is sent the keys and values that these see, which are all, or within a window those of the slice
    before. Under a causal mask pairs of devices exchange half of their queries, so that all have
    the same work. Arguments and result are those of whole sequences, in order; inside of a
    `jax.shard_map` over `context` they are the slices of a device.

    Args:
        q: Queries. H is a multiple of K.
        k: Keys, each read by H / K heads of queries.
        v: Values; V is at most C.
        segment_ids: The document of each token: a query sees keys of its own alone. Default: a row
            is one document.
        causal: Whether a query sees no later keys.
        window: The number of tokens that a query sees back to, itself included; without `causal` as
            many ahead. Default: all.
        soft_cap: Scores s become `soft_cap * tanh(s / soft_cap)`. Default: they stay.
        sinks: A score of each head that takes a share of the weights and has no value, as in
            gpt-oss. Default: none.
        scale: The factor of the products of queries and keys. Default: 1 / sqrt(C).
        kernel: The kernel; or "dot_product", which stores scores in memory. Default: on TPUs splash
            attention, on GPUs cuDNN's, then Pallas's, elsewhere "dot_product". The log of
            `jaxpipe` says which, and why.

    Returns:
        What each query reads.

    Raises:
        ValueError: If shapes do not fit, a kernel is wanted that cannot run, or none can and the
            scores of a device would be larger than 4 GiB.

    References:
        Dao, 2023, arXiv 2307.08691; gathered keys as in Dubey et al., 2024, arXiv 2407.21783,
        section 3.3.2.

    Example:
        >>> q = jnp.ones((2, 16, 4, 8))
        >>> k = v = jnp.ones((2, 16, 2, 8))
        >>> attention(q, k, v, window=4).shape
        (2, 16, 4, 8)
    """
    scores = Scores(causal, window, soft_cap, scale)
    _check_shapes(q, k, v, segment_ids, sinks, window)
    if kernel not in ("auto", *GRANULARITY):
        raise ValueError(f"`kernel` is {kernel!r}. Give 'auto' or one of {', '.join(GRANULARITY)}.")
    if trace_is_read_for() == "tokens":
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        return v + q[..., :1] + k[..., :1]
    if trace_is_read_for() == "rows":
        return _stored(scores)((q, k, v, sinks), segment_ids)
    mesh = jax.sharding.get_abstract_mesh()
    size = mesh.shape.get(_LENGTH_AXIS, 1)
    is_slice = _LENGTH_AXIS in mesh.manual_axes
    if not is_slice and q.shape[1] % size:
        raise ValueError(
            f"Sequences have {q.shape[1]} tokens, which the {size} devices of the axis "
            f"{_LENGTH_AXIS!r} do not divide. Give a multiple of {size}."
        )
    plan = AttentionPlan(
        kernel,
        _compat.platform() or jax.default_backend(),
        q.shape[1] * size if is_slice else q.shape[1],
        packed=segment_ids is not None,
        dtype=q.dtype.name,
        head_dim=q.shape[3],
        context_size=size,
        scores=scores,
        has_sinks=sinks is not None,
        key="kernel",
        widest_head=traced_widest_head(),
    )
    _say(plan)
    if trace_is_read_for() == "work" and plan.kernel != "dot_product":
        return counted_attention(plan, q, k, v, segment_ids, sinks)
    if not axes_of_vmap():
        return _on_devices(plan, q, k, v, segment_ids, sinks)
    return _over_vmap(plan)(q, k, v, segment_ids, sinks)


def _check_shapes(q: Any, k: Any, v: Any, segment_ids: Any, sinks: Any, window: Any) -> None:
    if not (q.ndim == k.ndim == v.ndim == 4 and q.shape[:2] == k.shape[:2] == v.shape[:2]):
        raise ValueError(
            f"`q` has shape {q.shape}, `k` {k.shape} and `v` {v.shape}. Give [b, T, H, C], "
            "[b, T, K, C] and [b, T, K, V] of the same sequences: this is self-attention."
        )
    H, K = q.shape[2], k.shape[2]
    if H % K or v.shape[2] != K or k.shape[3] != q.shape[3] or v.shape[3] > q.shape[3]:
        raise ValueError(
            f"`q` has {H} heads of {q.shape[3]} channels, `k` {K} of {k.shape[3]} and `v` "
            f"{v.shape[2]} of {v.shape[3]}. The heads of `k` and `v` are equally many and divide "
            "those of `q`; keys are as wide as queries, and values not wider."
        )
    if segment_ids is not None and segment_ids.shape != q.shape[:2]:
        raise ValueError(
            f"`segment_ids` has shape {segment_ids.shape}. Give [b, T], {q.shape[:2]}."
        )
    if sinks is not None and sinks.shape != (H,):
        raise ValueError(f"`sinks` has shape {sinks.shape}. Give [H], {(H,)}.")
    if window is not None and window < 1:
        raise ValueError(f"`window` is {window}. Give 1 or more: a query sees itself.")


def _over_vmap(plan: AttentionPlan) -> Callable[..., jax.Array]:
    """Returns attention for a `jax.vmap` over devices, which runs as one of all their rows."""
    on_devices: Any = jax.custom_batching.custom_vmap(partial(_on_devices, plan))

    @on_devices.def_vmap
    def of_all(size: int, are_batched: list[bool], *arguments: Any) -> tuple[jax.Array, bool]:
        def merged(x: Any, is_batched: Any, has_rows: bool) -> Any:
            if x is None or not has_rows:
                return x
            x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        *rows, sinks = (
            merged(x, is_batched, has_rows)
            for x, is_batched, has_rows in zip(
                arguments, are_batched, [True] * 4 + [False], strict=True
            )
        )
        q, k, v, segment_ids = rows
        out = _on_devices(plan, q, k, v, segment_ids, sinks)
        return out.reshape(size, -1, *out.shape[1:]), True

    return on_devices


def _on_devices(
    plan: AttentionPlan, q: Array, k: Array, v: Array, segment_ids: Any, sinks: Any
) -> jax.Array:
    kernels: dict[str, Kernel] = {
        "splash": splash_kernel,
        "cudnn": partial(cudnn_kernel, packed=plan.packed),
        "pallas": pallas_kernel,
        "dot_product": dot_product_kernel,
    }
    k, v = (_enough_heads(x, q) for x in (k, v))
    _check_stored(plan, q, k)
    run = kernels[plan.kernel]
    if plan.kernel == "dot_product" and plan.context_size == 1:
        return _stored(plan.scores)((q, k, v, sinks), segment_ids)
    on_mesh = attention_on_mesh(run, plan.scores, GRANULARITY[plan.kernel], _specs)
    return on_mesh(q, k, v, segment_ids, sinks)


def _enough_heads(x: Float[Array, "b T K C"], q: Float[Array, "b T H C"]) -> Array:
    """Repeats heads of keys or values so that the devices of `tensor` divide them as queries."""
    mesh = jax.sharding.get_abstract_mesh()
    size = mesh.shape.get(_HEAD_AXIS, 1) if _HEAD_AXIS in automatic_axes() else 1
    H, K = q.shape[2], x.shape[2]
    repeats = size // math.gcd(size, K)
    if H % size or H % (K * repeats):
        return x
    return x if repeats == 1 else jnp.repeat(x, repeats, axis=2)


def _specs(q: jax.Array, k: jax.Array) -> MeshSpecs | None:
    """Returns the specs of rows, sequences and heads on the mesh in context."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    free = {axis for axis in automatic_axes() if mesh.shape[axis] > 1}
    is_typed = any(types[axis] == AxisType.Explicit for axis in free)
    typed = jax.typeof(q).sharding.spec.partitions if is_typed else (None,) * 4
    dims = [[a for a in axes_of_dim(dim) if types[a] == AxisType.Explicit] for dim in typed]
    free -= {axis for axis in free if types[axis] == AxisType.Explicit}
    rows = [axis for axis in ROW_AXES if axis in free]
    if q.shape[0] % math.prod(mesh.shape[axis] for axis in [*dims[0], *rows]) == 0:
        dims[0] += rows
    if _LENGTH_AXIS in free:
        dims[1].append(_LENGTH_AXIS)
    size = mesh.shape.get(_HEAD_AXIS, 1)
    if _HEAD_AXIS in free and q.shape[2] % size == 0 and k.shape[2] % size == 0:
        dims[2].append(_HEAD_AXIS)
    spec = PartitionSpec(*(tuple(axes) or None for axes in dims))
    length_axis = _LENGTH_AXIS if mesh.shape.get(_LENGTH_AXIS, 1) > 1 else None
    return MeshSpecs(spec, spec, length_axis)


def _check_stored(plan: AttentionPlan, q: jax.Array, k: jax.Array) -> None:
    on = _specs(q, k)
    sizes = jax.sharding.get_abstract_mesh().shape
    rows, heads = q.shape[0], q.shape[2]
    if on is not None:
        rows //= math.prod(sizes[axis] for axis in axes_of_dim(on.queries[0]))
        heads //= math.prod(sizes[axis] for axis in axes_of_dim(on.queries[2]))
    check_stored_scores(plan, rows, heads)


@lru_cache(maxsize=256)
def _say(plan: AttentionPlan) -> None:
    """Logs which kernel runs, once for each plan; a warning if another one was to be expected."""
    is_fallback = plan.wanted == "auto" and plan.kernel == "dot_product" and plan.platform != "cpu"
    _log.log(logging.WARNING if is_fallback else logging.INFO, "%s", plan.reason)
