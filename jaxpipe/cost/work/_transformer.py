"""The work of a transformer from its published sizes.

D hidden, F width of an MLP, H query heads, K key and value heads, C channels of a head. Bytes are
of activations in bfloat16.
"""

from dataclasses import astuple, dataclass, replace

from ._layer_work import (
    SCORE_BYTES,
    ActivationBytes,
    Attention,
    LayerWork,
    ModelWork,
    Product,
)

_SUMS = ("dense_parameters", "elementwise_bytes", "between_bytes", "num_kernels")


@dataclass(frozen=True)
class Experts:
    """The experts of a layer."""

    num: int  # experts that tokens choose from
    active: int  # the number of experts that a token chooses
    width: int  # width of one expert
    shared: int = 0  # experts that every token passes, of the same width
    dense_layers: int = 0  # layers at the start of the model that have an MLP instead


@dataclass(frozen=True)
class LatentAttention:
    """The sizes of DeepSeek's attention with low-rank queries, keys and values."""

    query_rank: int  # 0 if queries are not compressed
    kv_rank: int
    nope_channels: int
    rope_channels: int
    v_channels: int


def transformer(
    *,
    layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    mlp: int,
    kv_heads: int | None = None,
    head_channels: int | None = None,
    gated: bool = True,
    tied: bool = False,
    dropout: bool = False,
    fused_attention: bool = True,
    whole_square: bool | None = None,
    score_bytes: float = SCORE_BYTES,
    backward_products: int = 5,
    window: int = 0,
    windowed: float = 1.0,
    mlps_before_experts: int = 0,
    latent: LatentAttention | None = None,
    experts: Experts | None = None,
) -> ModelWork:
    """Returns the work of a transformer; a gated MLP has three weights, as in llama, not two.

    Attention that is not fused computes the `whole_square` of T x T scores, other if that is said.
    If only a share `windowed` of its layers has the window, each is described as their mean. A
    layer with experts may be a block of layers, of which `mlps_before_experts` have an MLP.

    Example:
        >>> llama = transformer(
        ...     layers=80, hidden=8192, heads=64, kv_heads=8, mlp=28672, vocab=128256
        ... )
        >>> round(llama.parameters / 1e9, 1)
        70.6
    """
    if latent is None:
        C, kv = head_channels or hidden // heads, kv_heads or heads
        attention = Attention(heads, C, C, 2 * kv * C, window=window, windowed=windowed)
        products = (
            Product(hidden, (heads + 2 * kv) * C),
            Product(heads * C, hidden, "row"),
        )
    else:
        attention, products = _latent_attention(hidden, heads, latent)
    attention = replace(
        attention,
        fused=fused_attention,
        whole_square=not fused_attention if whole_square is None else whole_square,
        score_bytes=score_bytes,
        backward_products=backward_products,
    )
    dense = _layer("dense", hidden, products, attention, _mlp(hidden, mlp, gated), dropout)
    kinds = [(dense, layers)]
    if experts is not None:
        sparse = _expert_layer(hidden, products, attention, experts, gated)
        for _ in range(mlps_before_experts):
            sparse = _block(dense, sparse)
        kinds = [(dense, experts.dense_layers), (sparse, layers - experts.dense_layers)]
    return ModelWork(
        tuple(replace(kind, count=count) for kind, count in kinds if count),
        hidden,
        vocab,
        embedding_parameters=hidden * vocab,
        head_parameters=0 if tied else hidden * vocab,
    )


def _block(first: LayerWork, second: LayerWork) -> LayerWork:
    """Returns the work of two layers as that of one, which has the experts of the second."""
    one, other = first.attention, second.attention
    assert one is not None and other is not None
    kept = zip(astuple(first.activations), astuple(second.activations), strict=True)
    return replace(
        second,
        products=first.products + second.products,
        attention=replace(
            other, heads=one.heads + other.heads, kv_channels=one.kv_channels + other.kv_channels
        ),
        # Of both, only the input of the first is kept if all is computed again.
        activations=replace(ActivationBytes(*map(sum, kept)), full=first.activations.full),
        **{name: getattr(first, name) + getattr(second, name) for name in _SUMS},
    )


def _latent_attention(
    D: int, H: int, sizes: LatentAttention
) -> tuple[Attention, tuple[Product, ...]]:
    qk = sizes.nope_channels + sizes.rope_channels
    attention = Attention(H, qk, sizes.v_channels, H * (qk + sizes.v_channels))
    rank = sizes.query_rank
    queries = (Product(D, rank, "none"), Product(rank, H * qk)) if rank else (Product(D, H * qk),)
    products = (
        *queries,
        Product(D, sizes.kv_rank + sizes.rope_channels, "none"),
        Product(sizes.kv_rank, H * (sizes.nope_channels + sizes.v_channels)),
        Product(H * sizes.v_channels, D, "row"),
    )
    return attention, products


def _mlp(D: int, F: int, gated: bool) -> tuple[Product, ...]:
    return Product(D, 2 * F if gated else F), Product(F, D, "row")


def _attention_bytes(D: int, products: tuple[Product, ...], attention: Attention) -> float:
    """Returns the bytes of a token that attention keeps: norm, projections, result."""
    inner = sum(p.n for p in products[:-1]) + attention.heads * attention.v_channels
    return 2.0 * (2 * D + inner) + 4.0 * attention.heads


def _between_bytes(D: int, dropout: bool) -> float:
    """Returns the bytes of two norms and residuals, each of which reads and writes 2 to 3 times."""
    return 2.0 * (14 if dropout else 10) * D


def _layer(
    name: str,
    D: int,
    projections: tuple[Product, ...],
    attention: Attention,
    mlp: tuple[Product, ...],
    dropout: bool,
) -> LayerWork:
    products = projections + mlp
    F = mlp[1].k
    kept = _attention_bytes(D, projections, attention) + 2.0 * (2 * D + mlp[0].n + F)
    kept += 2.0 * D if dropout else 0.0  # two masks of a byte
    moved = 2.0 * (sum(p.n for p in products[:-1]) - D + mlp[0].n + F)
    parameters = sum(p.k * p.n for p in products) + 2 * D
    cheap = 2.0 * (mlp[0].n + F + 2 * D)
    return LayerWork(
        name=name,
        products=products,
        attention=attention,
        dense_parameters=parameters,
        activations=ActivationBytes(kept, kept - cheap / 2 if attention.fused else kept, 2.0 * D),
        elementwise_bytes=moved,
        between_bytes=_between_bytes(D, dropout),
        num_kernels=16,
        boundary_bytes=2.0 * D,
    )


def _expert_layer(
    D: int, projections: tuple[Product, ...], attention: Attention, experts: Experts, gated: bool
) -> LayerWork:
    F, width = experts.width, 2 if gated else 1
    chosen = (
        Product(D, width * F, "expert", experts.active),
        Product(F, D, "expert", experts.active),
    )
    router = (Product(D, experts.num, "none"),)
    shared = _mlp(D, experts.shared * F, gated) if experts.shared else ()
    dense = projections + router + shared
    passed = experts.active + experts.shared
    per_expert = 2.0 * (2 * D + (width + 1) * F)
    kept = _attention_bytes(D, projections, attention) + 4.0 * D + passed * per_expert
    products = dense + chosen
    # Tokens are copied for their experts, sorted, and summed again.
    moved = 2.0 * (sum(p.n for p in projections[:-1]) + passed * (7 * D + 3 * F))
    return LayerWork(
        name="experts",
        products=products,
        attention=attention,
        dense_parameters=sum(p.k * p.n for p in dense) + 2 * D,
        expert_parameters=experts.num * sum(p.k * p.n for p in chosen),
        num_experts=experts.num,
        active_experts=experts.active,
        activations=ActivationBytes(kept, kept - passed * 2.0 * F, 2.0 * D),
        elementwise_bytes=moved,
        between_bytes=_between_bytes(D, False),
        num_kernels=48,
        boundary_bytes=2.0 * D,
        expert_boundary_bytes=2.0 * D,
        row_bytes=2.0 * experts.active * 7 * D,
        inner_row_bytes=2.0 * experts.active * 3 * F,
    )
