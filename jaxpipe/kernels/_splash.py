"""Splash attention, JAX's flash attention for TPUs, on any part of a sequence.

b sequences, t queries of u keys, H query heads, K key and value heads, C channels of a query and
key head, V of a value head.
"""

from functools import lru_cache, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask_info,
)
from jaxtyping import Array, Float

from ._scores import Placement, Scores, Segments, Visible

SPLASH_BLOCK = 128
"""Splash attention works in blocks of so many tokens, or of a multiple."""
_BLOCKS = (512, 256, SPLASH_BLOCK)


def splash_kernel(
    scores: Scores,
    q: Float[Array, "b t H C"],
    k: Float[Array, "b u K C"],
    v: Float[Array, "b u K V"],
    sinks: Float[Array, " H"] | None,
    segments: Segments | None,
    where: Placement,
    *,
    interpret: bool = False,
) -> Float[Array, "b t H V"]:
    """Runs splash attention of one device."""
    block_q, block_kv = (_block(length) for length in (where.run, where.num_keys))
    sizes = splash_attention_kernel.BlockSizes(
        block_q=block_q, block_kv=block_kv, block_kv_compute=block_kv, block_q_dkv=block_q,
        block_kv_dkv=block_kv, block_kv_dkv_compute=block_kv, block_q_dq=block_q,
        block_kv_dq=block_kv,
    )  # fmt: skip
    visible = scores.visible
    table = _mask_infos(visible, _Runs.of(where), block_q, block_kv)
    forward, dkv = jax.tree.map(lambda x: jnp.asarray(x)[where.device][None], table)
    masks = visible != Visible(None, None)
    forward, dkv = (
        splash_attention_mask_info.MaskInfo(
            data_next=cast(Any, data_next),
            mask_next=None,
            block_mask=cast(Any, block_mask),
            partial_mask_blocks=None,
            q_sequence=cast(Any, where.indices() if masks else None),
        )
        for data_next, block_mask in (forward, dkv)
    )
    kernel = splash_attention_kernel.SplashAttentionKernel(
        forward,
        forward,
        dkv,
        block_sizes=sizes,
        is_mqa=False,
        save_residuals=False,
        mask_value=splash_attention_kernel.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=scores.soft_cap,
        # Of the result and the sums of the softmax: where both are saved, it does not run again.
        residual_checkpoint_name="context",
        mask_function=visible if masks else None,
        interpret=interpret,
    )
    documents = None if segments is None else splash_attention_kernel.SegmentIds(*segments)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * scores.scale_of(q), k, v))
    run = jax.vmap(kernel, in_axes=(0, 0, 0, None if documents is None else 0, None))
    # By this name the cost of the kernel is known, for which XLA has no estimate.
    with jax.named_scope(f"pairs_{where.most_pairs(visible)}_of_{q.shape[2] * k.shape[2]}"):
        out = cast(jax.Array, run(q, k, v, documents, sinks))
    return jnp.swapaxes(out, 1, 2)


def _block(length: int) -> int:
    block = next((size for size in _BLOCKS if length % size == 0), None)
    if block is None:
        raise ValueError(
            f"A device has {length} tokens of a sequence in a row. Splash attention works in "
            f"blocks of {SPLASH_BLOCK} tokens: give a multiple of {SPLASH_BLOCK}, or "
            "`dot_product`."
        )
    return block


class _Runs(tuple):
    """A `Placement` without the device, by which tables are kept: (starts, run, num_keys)."""

    @classmethod
    def of(cls, where: Placement) -> "_Runs":
        return cls((tuple(map(tuple, where.starts.tolist())), where.run, where.num_keys))


Blocks = tuple[np.ndarray, np.ndarray]
"""[n, Q, K] which block is read next, and whether it is seen nowhere, in part or everywhere."""


# A layer is traced several times, and for 128,000 tokens a table takes a tenth of a second.
@lru_cache(maxsize=64)
def _mask_infos(
    visible: Visible, runs: _Runs, block_q: int, block_kv: int
) -> tuple[Blocks, Blocks]:
    """Returns the blocks that a forward and a backward for keys and values run, for n devices.

    `splash_attention_mask_info.process_mask` computes the same from the mask of every token, which
    takes a minute for 128,000. Here blocks are compared, not tokens.
    """
    starts, run, num_keys = runs
    firsts = np.asarray(starts)[:, :, None] + np.arange(0, run, block_q)  # [n, R, blocks of a run]
    keys = np.arange(0, num_keys, block_kv)
    of_device = partial(visible.of_blocks, block_q=block_q, keys=keys, block=block_kv)
    states = np.stack([of_device(first.reshape(-1)) for first in firsts])
    which, seen = _packed(states.swapaxes(1, 2))
    return _packed(states), (which.swapaxes(1, 2), seen.swapaxes(1, 2))


def _packed(states: np.ndarray) -> Blocks:
    """Moves the blocks that are seen to the start of every row, and cuts off what no row needs.

    Nothing is read for what is left over: it names the last block of the row.
    """
    width = max(int(np.count_nonzero(states, axis=2).max()), 1)
    order = np.argsort(states == 0, axis=2, kind="stable")[:, :, :width]  # seen blocks first
    states = np.take_along_axis(states, order, axis=2)
    last = np.maximum(np.count_nonzero(states, axis=2)[..., None] - 1, 0)
    which = np.take_along_axis(order, np.minimum(np.arange(width), last), axis=2)
    # Scalar memory is small.
    small = np.int8 if which.max() <= np.iinfo(np.int8).max else np.int16
    return which.astype(small), states.astype(np.int8)
