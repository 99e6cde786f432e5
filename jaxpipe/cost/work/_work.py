"""The work of layers and of a model per token, as plain numbers, and that of a transformer.

D hidden, F width of an MLP, H query heads, K key and value heads, C channels of a head. Bytes of
a transformer are of activations in bfloat16.
"""

from dataclasses import astuple, dataclass, replace
from typing import Literal

Split = Literal["column", "row", "expert", "none"]


@dataclass(frozen=True)
class Product:
    """A matrix product of [tokens, k] by [k, n]."""

    k: int  # the size of the contracted dim
    n: int  # the size of the dim that it makes
    # How tensor parallelism divides it: the columns of the weight ("column": n), its rows ("row":
    # k), or not at all ("none"). Weights of experts ("expert") are divided over devices by expert.
    split: Split = "column"
    copies: int | float = 1  # how often a token passes it: the experts that it chooses, else 1
    taps: int = 1  # the positions of a convolution's kernel, each of which is a product of its own


SCORE_BYTES = 10.0
"""Bytes read or written for a score in 16 bits: scores, mask, softmax, dropout and the product."""
FLOAT32_SCORE_BYTES = 16.0
"""The same for a score in float32, by cycles of XLA:TPU (docs/dev/LOG.md)."""


@dataclass(frozen=True)
class Attention:
    """The part of attention that grows with the length of a sequence."""

    heads: int  # the number of query heads
    qk_channels: int  # channels of a head in queries and keys
    v_channels: int  # channels of a head in values
    # Channels of keys and values of all heads together, which context parallelism moves.
    kv_channels: int
    window: int = 0  # the positions that a token attends to at most; 0 for all before it
    # The share of layers with the window, if one description is the mean of several layers.
    windowed: float = 1.0
    fused: bool = True  # whether scores stay on the chip, as in flash attention
    # Products of its backward if it is fused, which computes the scores again.
    backward_products: int = 5
    # Whether all T x T scores are computed, also those that the mask removes.
    whole_square: bool = False
    # Bytes that are read or written for each score that leaves the chip.
    score_bytes: float = SCORE_BYTES

    def positions(self, length: int) -> float:
        """Returns the positions that a token attends to, on average."""
        if self.window and self.window < length:
            inside = self.window - self.window**2 / (2 * length)
            return self.windowed * inside + (1 - self.windowed) * length / 2
        return length / 2


def backward_products(kernel: str) -> int:
    """Returns the products of a fused backward: 5, or 7 where queries have a kernel of their own.

    Splash attention computes the gradients of queries, and those of keys and values, by a kernel
    each.
    """
    return 7 if kernel == "splash" else 5


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes that a token leaves for the backward, by policy of rematerialization."""

    none: int | float  # if nothing is computed again
    # If the inner attention and cheap elementwise operations are computed again.
    selective: int | float
    full: int | float  # if only the layer's input is kept


@dataclass(frozen=True)
class LayerWork:
    """The work of one kind of layer per token."""

    name: str  # a name of the kind
    products: tuple[Product, ...]  # its matrix products with weights
    attention: Attention | None  # its attention, or None
    dense_parameters: int  # weights outside of experts
    activations: ActivationBytes  # bytes kept per token on a device that holds the whole layer
    # Bytes that operations other than products read and write in a forward, of those that tensor
    # parallelism divides.
    elementwise_bytes: int | float
    # The same of norms, residuals and dropout, which only sequence parallelism divides.
    between_bytes: int | float
    num_kernels: int  # operations that a device starts in a forward
    boundary_bytes: int | float  # bytes of a token between layers
    count: int = 1  # how many layers of this kind follow each other
    expert_parameters: int = 0  # weights of all its experts
    num_experts: int = 0  # its experts that tokens choose from; 0 if it has none
    active_experts: int = 0  # the number of experts that a token chooses
    expert_boundary_bytes: int | float = 0  # bytes of a token on its way to one expert
    weight_bytes: float = 2.0  # bytes of a weight while it is gathered
    # The part of `elementwise_bytes` that copies, sorts and sums a token's rows for experts.
    row_bytes: int | float = 0
    inner_row_bytes: int | float = 0  # the part of `row_bytes` inside of the experts
    # The bytes of a backward, without what it computes again; None: 1.5 times those of a forward.
    backward_elementwise_bytes: float | None = None
    tensor_sums: int = 2  # results that are summed over `tensor`


@dataclass(frozen=True)
class ModelWork:
    """The work of a model per token."""

    layers: tuple[LayerWork, ...]  # the kinds of layers, from the first to the last
    hidden: int  # the number of channels between layers
    vocab: int  # rows of the embedding, and columns of the head
    embedding_parameters: int  # weights of the embedding, and of a head that is tied to it
    head_parameters: int  # weights of the head; 0 if it is tied to the embedding

    @property
    def num_layers(self) -> int:
        """Returns the number of layers."""
        return sum(layer.count for layer in self.layers)

    @property
    def parameters(self) -> int:
        """Returns the number of weights, with those of embedding and head."""
        layers = (la.count * (la.dense_parameters + la.expert_parameters) for la in self.layers)
        return self.embedding_parameters + self.head_parameters + sum(layers)

    def kinds(self) -> tuple[LayerWork, ...]:
        """Returns the kind of every layer, from the first to the last."""
        return tuple(layer for layer in self.layers for _ in range(layer.count))


def flops_per_token(work: ModelWork, length: int, *, whole_square: bool = False) -> float:
    """Returns the operations of a model's forward and backward per token, as papers count them.

    Every weight that a token is multiplied by counts 6; rematerialization counts nothing; attention
    counts the positions before a token, or, as Megatron's formula does, the `whole_square`.
    """
    total = 6.0 * work.hidden * work.vocab
    for layer in work.layers:
        operations = sum(2 * p.k * p.n * p.copies for p in layer.products)
        if layer.attention is not None:
            positions = length if whole_square else layer.attention.positions(length)
            operations += attention_flops(layer.attention, positions)
        total += 3.0 * layer.count * operations
    return total


def attention_flops(attention: Attention, positions: int | float) -> float:
    """Returns the operations of the scores and sums of a token's forward."""
    channels = attention.qk_channels + attention.v_channels
    return 2.0 * attention.heads * channels * positions


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
