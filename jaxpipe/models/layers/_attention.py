"""Causal attention over packed sequences, and how a kernel runs on the shards of a device.

b sequences, T tokens, H query heads, K key and value heads, C channels of a query and key head, V
of a value head.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ...sharding import LogicalAxes, Rules, partition_spec, rules_without_manual_axes
from ._on_shards import Local, automatic_axes, on_shards

Attention = Callable[..., jax.Array]
"""`(q, k, v, segment_ids) -> out`; scores are divided by sqrt(C), and V is at most C."""


def causal_mask(segment_ids: Int[Array, "b T"]) -> Bool[Array, "b 1 T T"]:
    """Returns whether each query (dim 2) sees each key (dim 3): its document's up to itself."""
    length = segment_ids.shape[1]
    same_segment = segment_ids[:, :, None] == segment_ids[:, None, :]
    return (same_segment & jnp.tril(jnp.ones((length, length), bool)))[:, None]


def dot_product_attention(
    q: Float[Array, "b T H C"],
    k: Float[Array, "b T K C"],
    v: Float[Array, "b T K V"],
    segment_ids: Int[Array, "b T"],
) -> Float[Array, "b T H V"]:
    """Runs `jax.nn.dot_product_attention` with a causal mask, grouped if K < H, for CPU and GPU."""
    return _masked_attention(q, k, v, causal_mask(segment_ids))


def attend_to_past(
    q: Float[Array, "b t H C"],
    k: Float[Array, "b T K C"],
    v: Float[Array, "b T K V"],
    key_segment_ids: Int[Array, "b T"],
    segment_ids: Int[Array, "b t"],
    mask: Bool[Array, "t T"],
) -> Float[Array, "b t H V"]:
    """Runs the attention of one slice of each sequence, by `jax.nn.dot_product_attention`."""
    same_segment = segment_ids[:, :, None] == key_segment_ids[:, None, :]
    return _masked_attention(q, k, v, (same_segment & mask)[:, None])


def _masked_attention(q: Array, k: Array, v: Array, mask: Array) -> Array:
    return jax.nn.dot_product_attention(q, k, as_wide(v, q), mask=mask)[..., : v.shape[3]]


def as_wide(v: Float[Array, "b T K V"], q: Float[Array, "b t H C"]) -> Float[Array, "b T K C"]:
    """Pads values to the width of queries, which kernels need."""
    return jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, q.shape[3] - v.shape[3])))


def attention_on_shards(local: Local, rules: Rules, name: str) -> Attention:
    """Returns attention by a kernel that XLA cannot partition, on the shards of `rules`."""

    def attention(q, k, v, segment_ids):
        if not automatic_axes():
            return local((q, k, v), segment_ids)
        mesh = jax.sharding.get_abstract_mesh()
        auto_rules = rules_without_manual_axes(rules, mesh)
        _check_splits(auto_rules, dict(mesh.shape), name)
        heads, kv_heads, segments = (
            partition_spec(axes, auto_rules) for axes in (_HEAD_AXES, _KV_HEAD_AXES, _SEGMENT_AXES)
        )
        specs = (heads, kv_heads, kv_heads)
        return on_shards(local, automatic_axes(), specs, segments, heads)((q, k, v), segment_ids)

    return attention


_HEAD_AXES: LogicalAxes = ("activation_batch", None, "activation_heads", None)
_KV_HEAD_AXES: LogicalAxes = ("activation_batch", None, "activation_kv_heads", None)
_SEGMENT_AXES: LogicalAxes = ("activation_batch", None)


def _check_splits(rules: Rules, sizes: dict[str, int], name: str) -> None:
    length, heads, kv_heads = (
        _split_over(name, rules, sizes)
        for name in ("activation_length", "activation_heads", "activation_kv_heads")
    )
    if length:
        raise ValueError(
            f"`attention={name}` needs whole sequences, but the rule of 'activation_length' splits "
            f"them over {length}. Give those axes size 1, or `attention=dot_product`."
        )
    if heads != kv_heads:
        raise ValueError(
            f"`attention={name}` needs every query head beside its key and value head, but the "
            f"rule of 'activation_heads' splits over {heads} and that of 'activation_kv_heads' "
            f"over {kv_heads}. Give both the same rule, or `attention=dot_product`."
        )


def _split_over(name: str, rules: Rules, sizes: dict[str, int]) -> list[str]:
    return [axis for axis in dict(rules)[name] if sizes[axis] > 1]
