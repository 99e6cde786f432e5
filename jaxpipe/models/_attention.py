"""Causal attention over packed sequences, by the kernel that suits the device.

b sequences, T tokens, H query heads, K key and value heads, C channels of a head.
"""

from collections.abc import Callable
from functools import partial
from typing import cast

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..sharding import LogicalAxes, Rules, automatic_rules, partition_spec

Attention = Callable[..., jax.Array]


def causal_mask(segment_ids: Int[Array, "b T"]) -> Bool[Array, "b 1 T T"]:
    """True where query (dim 2) may look at key (dim 3): the same document, not the future."""
    length = segment_ids.shape[1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return (same & jnp.tril(jnp.ones((length, length), bool)))[:, None]


def dot_product_attention(
    q: Float[Array, "b T H C"],
    k: Float[Array, "b T K C"],
    v: Float[Array, "b T K C"],
    segment_ids: Int[Array, "b T"],
) -> Float[Array, "b T H C"]:
    """`jax.nn.dot_product_attention`, grouped-query if K < H. For CPU and GPU."""
    return jax.nn.dot_product_attention(q, k, v, mask=causal_mask(segment_ids))


def splash_attention(rules: Rules, *, interpret: bool = False) -> Attention:
    """JAX's Pallas flash attention for TPU, on the shards that `rules` give.

    A Pallas kernel is opaque to XLA's partitioner, so the axes that are still automatic are made
    manual around it.

    Args:
        rules: Logical axis rules; batch and heads may be split, the sequence may not.
        interpret: Run the kernel in Pallas's interpreter, on any device: for tests.

    Returns:
        A function like `dot_product_attention`.

    Raises:
        ValueError: When called: if the sequence is not a multiple of 128 or is split, or if heads
            of queries and of keys are split differently.
    """

    def attention(q, k, v, segment_ids):
        mesh = jax.sharding.get_abstract_mesh()
        automatic = set(mesh.axis_names) - set(mesh.manual_axes)
        local = _splash_kernel(interpret)
        if not automatic:
            return local(q, k, v, segment_ids)
        kept = automatic_rules(rules, mesh)
        _check_splits(kept, dict(mesh.shape))
        heads, kv_heads, segments = (
            partition_spec(axes, kept) for axes in (_HEAD_AXES, _KV_HEAD_AXES, _SEGMENT_AXES)
        )
        on_shards = _on_shards(local, automatic, (heads, kv_heads, kv_heads, segments))
        return on_shards(q, k, v, segment_ids)

    return attention


_HEAD_AXES: LogicalAxes = ("activation_batch", None, "activation_heads", None)
_KV_HEAD_AXES: LogicalAxes = ("activation_batch", None, "activation_kv_heads", None)
_SEGMENT_AXES: LogicalAxes = ("activation_batch", None)


def _on_shards(local: Attention, axes: set[str], specs: tuple[PartitionSpec, ...]) -> Attention:
    """`local` on every shard over `axes`, differentiable inside a `jax.shard_map` over others.

    Pallas calls do not say over which axes their results vary, so the check is off in here, and
    what comes out looks equal on all ranks of a pipeline around it: JAX would add the gradients of
    the ranks up. Hence a derivative of our own, which says of every result that it varies.
    """
    shard_map = partial(jax.shard_map, axis_names=axes, check_vma=False)
    one_each = PartitionSpec(tuple(sorted(axes)))  # of what a device keeps for its own backward

    @jax.custom_vjp
    def attend(q, k, v, segment_ids):
        out = shard_map(local, in_specs=specs, out_specs=specs[0])(q, k, v, segment_ids)
        return _varying_like(q, out)

    def forward(q, k, v, segment_ids):
        def on_shard(q, k, v, segment_ids):
            return jax.vjp(lambda *qkv: local(*qkv, segment_ids), q, k, v)

        def run(*arguments):
            out, pull_back = _as_if_equal(on_shard, *arguments)
            return out, jax.tree.map(lambda x: jnp.expand_dims(x, 0), pull_back)

        run = shard_map(run, in_specs=specs, out_specs=(specs[0], one_each))
        return _varying_like(q, run(q, k, v, segment_ids))

    def backward(pull_back, gradient):
        def run(pull_back, gradient):
            pull_back = jax.tree.map(lambda x: jnp.squeeze(x, 0), pull_back)
            return _as_if_equal(lambda pull_back, g: pull_back(g), pull_back, gradient)

        run = shard_map(run, in_specs=(one_each, specs[0]), out_specs=specs[:3])
        return *_varying_like(gradient, run(pull_back, gradient)), None

    attend.defvjp(forward, backward)
    return attend


def _as_if_equal(f: Callable, *arguments: PyTree) -> PyTree:
    """`f(*arguments)`, traced as if they varied over no axis: as Pallas calls see the world."""
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    program, result = jax.make_jaxpr(f, return_shape=True)(*plain)
    leaves = jax.extend.core.jaxpr_as_fun(program)(*jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(result), leaves)


def _varying_like(example: jax.Array, tree: PyTree) -> PyTree:
    """`tree`, declared to vary over the manual axes over which `example` does."""
    varying = _varying(example)
    return jax.tree.map(
        lambda x: jax.lax.pcast(x, tuple(varying - _varying(x)), to="varying"), tree
    )


def _varying(x: jax.Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def _splash_kernel(interpret: bool) -> Attention:
    def attend(q, k, v, segment_ids):
        _, length, num_heads, head_dim = q.shape
        block = next((size for size in (512, 256, 128) if length % size == 0), None)
        if block is None:
            raise ValueError(
                f"`max_target_length` is {length}. Splash attention works in blocks of 128 tokens: "
                "give a multiple of 128, or `attention=dot_product`."
            )
        sizes = splash_attention_kernel.BlockSizes(
            block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block,
            block_kv_dkv=block, block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
        )  # fmt: skip
        mask = splash_attention_mask.MultiHeadMask(
            [splash_attention_mask.CausalMask((length, length))] * num_heads
        )
        kernel = splash_attention_kernel.make_splash_mha_single_device(
            mask, block_sizes=sizes, interpret=interpret
        )
        segments = splash_attention_kernel.SegmentIds(segment_ids, segment_ids)
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * head_dim**-0.5, k, v))
        out = cast(jax.Array, jax.vmap(kernel)(q, k, v, segments))
        return jnp.swapaxes(out, 1, 2)

    return attend


def _check_splits(rules: Rules, sizes: dict[str, int]) -> None:
    length, heads, kv_heads = (
        _split_over(name, rules, sizes)
        for name in ("activation_length", "activation_heads", "activation_kv_heads")
    )
    if length:
        raise ValueError(
            f"`attention=splash` needs whole sequences, but the rule of 'activation_length' splits "
            f"them over {length}. Give those axes size 1, or `attention=dot_product`."
        )
    if heads != kv_heads:
        raise ValueError(
            f"`attention=splash` needs every query head beside its key and value head, but the "
            f"rule of 'activation_heads' splits over {heads} and that of 'activation_kv_heads' "
            f"over {kv_heads}. Give both the same rule, or `attention=dot_product`."
        )


def _split_over(name: str, rules: Rules, sizes: dict[str, int]) -> list[str]:
    return [axis for axis in dict(rules)[name] if sizes[axis] > 1]
