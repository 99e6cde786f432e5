"""Flash attention for GPUs: cuDNN's, and JAX's Pallas kernel.

b sequences, t queries of u keys, H query heads, K key and value heads, C channels of a query and
key head, V of a value head.
"""

from dataclasses import replace
from typing import Literal, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from .._compat import import_pallas_gpu_attention
from ._dot_product import as_wide
from ._scores import Placement, Scores, Segments, dense_mask


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
    reads; so are parts of a sequence. Otherwise a row is one document and padding, whose outputs
    are those of tokens that see the document.
    """
    assert sinks is None and scores.soft_cap is None, "checked where a kernel is selected"
    is_whole = where.is_whole
    has_documents = segments is not None and (packed or not is_whole)
    mask = None
    if has_documents or not is_whole:
        mask = dense_mask(scores, segments, where)
    # A mask alone would do, but cuDNN computes nothing above the diagonal if it is told.
    window = None
    if is_whole and scores.window is not None:
        window = scores.window - 1, 0 if scores.causal else scores.window - 1
    out = jax.nn.dot_product_attention(
        *(q, k, as_wide(v, q)),
        mask=mask,
        scale=scores.scale,
        is_causal=is_whole and scores.causal,
        local_window_size=window,
        implementation=implementation,
    )
    return checkpoint_name(out[..., : v.shape[3]], "context")


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
    keys, values = (_one_per_query_head(x, q) for x in (k, as_wide(v, q)))
    out = mha(
        *(q, keys, values, None if segments is None else segments[0]),
        sm_scale=scores.scale_of(q),
        causal=scores.causal,
        block_sizes=sizes,
        interpret=interpret,
    )
    return checkpoint_name(cast(jax.Array, out)[..., : v.shape[3]], "context")


def _one_per_query_head(
    x: Float[Array, "b T K C"], q: Float[Array, "b T H C"]
) -> Float[Array, "b T H C"]:
    """Repeats heads of keys or values for a kernel without grouped queries."""
    return jnp.repeat(x, q.shape[2] // x.shape[2], axis=2)


def _check_blocks(length: int) -> None:
    if length > 128 and length % 128 != 0:
        raise ValueError(
            f"Sequences have {length} tokens. Pallas's attention works in blocks of 128 tokens: "
            "give a multiple of 128, or `cudnn`."
        )
