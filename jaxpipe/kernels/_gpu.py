"""Flash attention for GPUs: cuDNN's, and JAX's Pallas kernel.

b sequences, t queries of u keys, H query heads, K key and value heads, C channels of a query and
key head, V of a value head.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from .._compat import import_pallas_gpu_attention
from ._dot_product import as_wide
from ._scores import Placement, Scores, Segments, Visible, dense_mask

CUDNN_BLOCK = 128
"""Parts of sequences have a multiple of so many tokens. With a mask and half a block of keys the
gradients of queries may be NaN: https://github.com/pytorch/pytorch/issues/196678."""
_PARTS = 4
"""Parts that the queries of a device are cut into: each reads the keys that one of its own sees."""


def cudnn_kernel(
    scores: Scores,
    q: Float[Array, "b t H C"],
    k: Float[Array, "b u K C"],
    v: Float[Array, "b u K V"],
    sinks: Float[Array, " H"] | None,
    segments: Segments | None,
    where: Placement,
    *,
    packed: bool = True,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "b t H V"]:
    """Runs cuDNN's flash attention, in bfloat16 or float16.

    Rows that are `packed` may have several documents, told apart by a mask [b, 1, t, u] that cuDNN
    reads. Otherwise a row is one document and padding, whose outputs are those of tokens that see
    the document.
    """
    assert sinks is None and scores.soft_cap is None, "checked where a kernel is selected"
    run = partial(jax.nn.dot_product_attention, scale=scores.scale, implementation=implementation)
    # Padding is behind the document, but what the first device is sent as the end of a slice before
    # its own is not.
    is_behind_tail = len(where.starts) == 1 and not where.is_whole
    if scores.causal and not packed and not is_behind_tail:
        segments = None
    # cuDNN has no window that also looks ahead.
    if where.is_whole and (scores.causal or scores.window is None):
        mask = None if segments is None else dense_mask(scores, segments, where)
        # A mask alone would do, but cuDNN computes nothing above the diagonal if it is told.
        window = None if scores.window is None else (scores.window - 1, 0)
        out = run(
            *(q, k, as_wide(v, q)),
            mask=mask,
            is_causal=scores.causal,
            local_window_size=window,
        )
    else:
        out = _of_parts(run, scores, q, k, as_wide(v, q), segments, where)
    return checkpoint_name(out[..., : v.shape[3]], "context")


def _of_parts(
    run: Callable[..., jax.Array],
    scores: Scores,
    q: Float[Array, "b t H C"],
    k: Float[Array, "b u K C"],
    v: Float[Array, "b u K C"],
    segments: Segments | None,
    where: Placement,
) -> Float[Array, "b t H C"]:
    """Runs every part of a device's queries on the keys that one of them sees.

    cuDNN's causal mask puts the first query beside the first key, and results of several calls
    cannot be merged: JAX's gradient ignores the cotangent of the sums of the softmax. So a mask
    [b or 1, 1, queries of a part, their keys] is read.
    """
    if scores.visible == Visible(None, None) and segments is None:
        return run(q, k, v)
    per_run = max(_PARTS // where.starts.shape[1], 1)
    is_even = where.run % (per_run * CUDNN_BLOCK) == 0
    parts = where.parts(where.run // per_run if is_even else where.run)
    queries = jnp.split(q, len(parts), axis=1)
    if segments is None:
        documents = [None] * len(parts)
    else:
        documents = [(x, segments[1]) for x in jnp.split(segments[0], len(parts), axis=1)]
    outs = [
        _of_part(run, scores, q, k, v, segments, part)
        for q, segments, part in zip(queries, documents, parts, strict=True)
    ]
    return jnp.concatenate(outs, axis=1)


def _of_part(
    run: Callable[..., jax.Array],
    scores: Scores,
    q: Float[Array, "b t H C"],
    k: Float[Array, "b u K C"],
    v: Float[Array, "b u K C"],
    segments: Segments | None,
    where: Placement,
) -> Float[Array, "b t H C"]:
    first, last = where.keys_seen(scores.visible)
    # Every device cuts out as many as the one that sees most.
    count = min(-(-int((last - first).max()) // CUDNN_BLOCK) * CUDNN_BLOCK, where.num_keys)
    first = np.minimum(first, where.num_keys - count)
    cut = partial(_run_of_tokens, first=first, count=count, device=where.device)
    where = Placement(where.starts - first[:, None], where.run, count, where.device)
    lengths = None
    # Within a window all see as many, but for those at an end.
    if scores.window is None and (last - first < count).any():
        reach = jnp.asarray(last - first, jnp.int32)[where.device]
        lengths = jnp.broadcast_to(reach, q.shape[:1])
    if segments is not None:
        segments = segments[0], cut(segments[1])
    mask = dense_mask(scores, segments, where)
    return run(q, cut(k), cut(v), mask=mask, key_value_seq_lengths=lengths)


def _run_of_tokens(
    x: Array, first: Int[np.ndarray, " n"], count: int, device: Array | int
) -> jax.Array:
    if (first == first[0]).all():
        return lax.slice_in_dim(x, int(first[0]), int(first[0]) + count, axis=1)
    return lax.dynamic_slice_in_dim(x, jnp.asarray(first)[device], count, axis=1)


def pallas_kernel(
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
    """Runs JAX's Pallas flash attention for GPUs, which reads the documents of packed rows."""
    assert where.is_whole, "checked where a kernel is selected"
    assert sinks is None and scores.soft_cap is None and scores.window is None, "likewise"
    # Imported here: on other devices than GPUs it is not needed, and it takes a second.
    BlockSizes, mha = import_pallas_gpu_attention()
    sizes = BlockSizes.get_default()
    if q.shape[3] > 128:  # two blocks of 128 tokens do not fit into a multiprocessor's memory
        sizes = replace(sizes, block_q=64, block_k=64)
    _check_blocks(q.shape[1])
    # The kernel has no grouped queries.
    repeats = q.shape[2] // k.shape[2]
    keys, values = (jnp.repeat(x, repeats, axis=2) for x in (k, as_wide(v, q)))
    out = mha(
        *(q, keys, values, None if segments is None else segments[0]),
        sm_scale=scores.scale_of(q),
        causal=scores.causal,
        block_sizes=sizes,
        interpret=interpret,
    )
    return checkpoint_name(cast(jax.Array, out)[..., : v.shape[3]], "context")


def _check_blocks(length: int) -> None:
    if length > 128 and length % 128 != 0:
        raise ValueError(
            f"Sequences have {length} tokens. Pallas's attention works in blocks of 128 tokens: "
            "give a multiple of 128, or `cudnn`."
        )
