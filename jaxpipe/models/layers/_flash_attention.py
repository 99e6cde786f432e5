"""Attention by flash kernels, which never hold the scores: one for TPUs, two for GPUs.

b sequences, T tokens, H query heads, K key and value heads, C channels of a query and key head, V
of a value head.
"""

from dataclasses import replace
from typing import Literal, cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jaxtyping import Array, Float

from ..._compat import import_pallas_gpu_attention
from ...sharding import Rules
from ._attention import Attention, as_wide, attention_on_shards, causal_mask
from ._on_shards import Local


def splash_attention(rules: Rules, *, interpret: bool = False) -> Attention:
    """Returns JAX's Pallas flash attention for TPU, on the shards that `rules` define."""
    return attention_on_shards(_splash_kernel(interpret), rules, "splash")


def cudnn_attention(
    rules: Rules, *, packed: bool, implementation: Literal["cudnn", "xla"] = "cudnn"
) -> Attention:
    """Returns cuDNN's flash attention for GPUs, in bfloat16 or float16, on the shards of `rules`.

    `packed` rows may have several documents, told apart by a mask [b, 1, T, T] that cuDNN reads.
    Without it a row is one document and padding, whose outputs are those of tokens that see the
    document.
    """

    def attend(qkv, segment_ids):
        q, k, v = qkv
        mask = causal_mask(segment_ids) if packed else None
        out = jax.nn.dot_product_attention(
            *(q, k, as_wide(v, q)), mask=mask, is_causal=True, implementation=implementation
        )
        return out[..., : v.shape[3]]

    return attention_on_shards(attend, rules, "cudnn")


def pallas_gpu_attention(rules: Rules, *, interpret: bool = False) -> Attention:
    """Returns JAX's Pallas flash attention for GPUs, which reads the documents of packed rows."""

    def attend(qkv, segment_ids):
        # Imported here: on other devices than GPUs it is not needed, and it takes a second.
        BlockSizes, mha = import_pallas_gpu_attention()
        q, k, v = qkv
        sizes = BlockSizes.get_default()
        if q.shape[3] > 128:  # two blocks of 128 tokens do not fit into a multiprocessor's memory
            sizes = replace(sizes, block_q=64, block_k=64)
        _check_blocks(q.shape[1])
        keys, values = (_one_per_query_head(x, q) for x in (k, as_wide(v, q)))
        out = mha(
            *(q, keys, values, segment_ids),
            sm_scale=q.shape[3] ** -0.5,
            causal=True,
            block_sizes=sizes,
            interpret=interpret,
        )
        return cast(jax.Array, out)[..., : v.shape[3]]

    return attention_on_shards(attend, rules, "pallas")


def _one_per_query_head(
    x: Float[Array, "b T K C"], q: Float[Array, "b T H C"]
) -> Float[Array, "b T H C"]:
    """Repeats heads of keys or values for a kernel without grouped queries."""
    return jnp.repeat(x, q.shape[2] // x.shape[2], axis=2)


def _check_blocks(length: int) -> None:
    if length > 128 and length % 128 != 0:
        raise ValueError(
            f"`max_target_length` is {length}. Pallas's attention works in blocks of 128 tokens: "
            "give a multiple of 128, or `attention=cudnn`."
        )


def _splash_kernel(interpret: bool) -> Local:
    def attend(qkv, segment_ids):
        q, k, v = qkv
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
