"""Runs a kernel of attention on every device of a mesh: on its rows, heads and slice of sequences.

b sequences, T tokens, H query heads, K key and value heads, C channels of a query and key head, V
of a value head.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
from jax.sharding import PartitionSpec

from ..sharding import (
    LogicalAxes,
    Rules,
    automatic_axes,
    on_shards,
    partition_spec,
    rules_without_manual_axes,
)
from ._context import Kernel, on_slices
from ._dot_product import dot_product_kernel
from ._gpu import CUDNN_BLOCK, cudnn_kernel, pallas_kernel
from ._scores import CAUSAL, Scores
from ._splash import SPLASH_BLOCK, splash_kernel

Attention = Callable[..., jax.Array]
"""`(q, k, v, segment_ids) -> out`, or with sinks [H] behind them; V is at most C. What a backward
needs of `out` has the name "context" for policies of rematerialization."""

_HEAD_AXES: LogicalAxes = ("activation_batch", "activation_length", "activation_heads", None)
_KV_HEAD_AXES: LogicalAxes = ("activation_batch", "activation_length", "activation_kv_heads", None)

GRANULARITY = {"splash": SPLASH_BLOCK, "cudnn": CUDNN_BLOCK, "pallas": 128, "dot_product": 1}
"""Tokens in blocks of which kernels work; parts of a slice are multiples of them."""


class MeshSpecs(NamedTuple):
    """How arguments of attention are divided over the axes of a mesh that are not manual.

    Attributes:
        queries: The spec of [b, T, H, C].
        keys: The spec of [b, T, K, C].
        length_axis: The axis that sequences are split over, manual or not. None: they are whole.
    """

    queries: PartitionSpec
    keys: PartitionSpec
    length_axis: str | None


SpecsOf = Callable[[jax.Array, jax.Array], MeshSpecs | None]


def attention_on_mesh(
    kernel: Kernel, scores: Scores, granularity: int, specs: SpecsOf
) -> Callable[..., jax.Array]:
    """Returns attention by a kernel that XLA cannot partition, on the shards of a device.

    Args:
        granularity: Runs of queries and parts of slices are multiples of so many tokens.
        specs: Returns the specs of queries and keys on the mesh in context; None without a mesh.

    Returns:
        `(q, k, v, segment_ids or None, sinks or None) -> out`.
    """

    def attention(q, k, v, segment_ids=None, sinks=None):
        on = specs(q, k)
        axis = on and on.length_axis
        size = jax.sharding.get_abstract_mesh().shape[axis] if axis else 1
        local = on_slices(kernel, scores, axis, size, granularity)
        inputs = q, k, v, sinks
        axes = automatic_axes()
        if not axes:
            return local(inputs, segment_ids)
        assert on is not None, "a mesh with automatic axes"
        of_rows = PartitionSpec(*tuple(on.queries)[:2])
        of_sinks = None if sinks is None else PartitionSpec(tuple(on.queries)[2])
        of_inputs = on.queries, on.keys, on.keys, of_sinks
        of_segments = None if segment_ids is None else of_rows
        run = on_shards(local, axes, of_inputs, of_segments, on.queries)
        return run(inputs, segment_ids)

    return attention


def by_rules(rules: Rules, name: str) -> SpecsOf:
    """Returns the specs that logical rules have for the mesh in context.

    Raises:
        ValueError: From the function that is returned, if rules split what the kernel `name` needs
            whole.
    """

    def specs(q: jax.Array, k: jax.Array) -> MeshSpecs | None:
        del q, k
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return None
        sizes = dict(mesh.shape)
        _check_splits(rules, sizes, name)
        queries, keys = (
            partition_spec(axes, rules_without_manual_axes(rules, mesh))
            for axes in (_HEAD_AXES, _KV_HEAD_AXES)
        )
        length = [axis for axis in dict(rules)["activation_length"] if sizes[axis] > 1]
        return MeshSpecs(queries, keys, length[0] if length else None)

    return specs


def _check_splits(rules: Rules, sizes: dict[str, int], name: str) -> None:
    length, heads, kv_heads = (
        [axis for axis in dict(rules)[name] if sizes[axis] > 1]
        for name in ("activation_length", "activation_heads", "activation_kv_heads")
    )
    if len(length) > 1 or (length and name == "pallas"):
        most = "whole sequences" if name == "pallas" else "sequences that one axis splits at most"
        raise ValueError(
            f"`attention={name}` needs {most}, but the rule of 'activation_length' splits them "
            f"over {length}. Give those axes size 1, or `attention=auto`."
        )
    if heads != kv_heads:
        raise ValueError(
            f"`attention={name}` needs every query head beside its key and value head, but the "
            f"rule of 'activation_heads' splits over {heads} and that of 'activation_kv_heads' "
            f"over {kv_heads}. Give both the same rule, or `attention=dot_product`."
        )


def splash_attention(
    rules: Rules, scores: Scores = CAUSAL, *, interpret: bool = False
) -> Attention:
    """Returns JAX's Pallas flash attention for TPU, on the shards that `rules` define.

    Args:
        rules: Which mesh axes split rows, sequences and heads.
        scores: How scores are computed.
        interpret: Whether Pallas's interpreter runs it, on any device.

    Returns:
        `(q, k, v, segment_ids) -> out`.
    """
    return _by_rules("splash", partial(splash_kernel, interpret=interpret), scores, rules)


def cudnn_attention(
    rules: Rules,
    scores: Scores = CAUSAL,
    *,
    packed: bool,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Attention:
    """Returns cuDNN's flash attention for GPUs, in bfloat16 or float16, on the shards of `rules`.

    `packed` rows may have several documents, told apart by a mask [b, 1, T, T] that cuDNN reads.
    Without it a row is one document and padding, whose outputs are those of tokens that see the
    document.

    Args:
        rules: Which mesh axes split rows, sequences and heads.
        scores: How scores are computed.
        packed: Whether a row may have several documents.
        implementation: "xla" computes the same by XLA, on any device.

    Returns:
        `(q, k, v, segment_ids) -> out`.
    """
    kernel = partial(cudnn_kernel, packed=packed, implementation=implementation)
    return _by_rules("cudnn", kernel, scores, rules)


def pallas_gpu_attention(
    rules: Rules, scores: Scores = CAUSAL, *, interpret: bool = False
) -> Attention:
    """Returns JAX's Pallas flash attention for GPUs, which reads the documents of packed rows.

    Args:
        rules: Which mesh axes split rows, sequences and heads.
        scores: How scores are computed.
        interpret: Whether Pallas's interpreter runs it, on any device.

    Returns:
        `(q, k, v, segment_ids) -> out`.
    """
    return _by_rules("pallas", partial(pallas_kernel, interpret=interpret), scores, rules)


def sliced_dot_product_attention(rules: Rules, scores: Scores = CAUSAL) -> Attention:
    """Returns attention that stores its scores, on the shards of `rules`.

    Each device stores those of its own queries, and keys and values are gathered as for kernels.

    Args:
        rules: Which mesh axes split rows, sequences and heads.
        scores: How scores are computed.

    Returns:
        `(q, k, v, segment_ids) -> out`.
    """
    return _by_rules("dot_product", dot_product_kernel, scores, rules)


def _by_rules(name: str, kernel: Kernel, scores: Scores, rules: Rules) -> Attention:
    return attention_on_mesh(kernel, scores, GRANULARITY[name], by_rules(rules, name))
