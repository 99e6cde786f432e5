"""The work of layers and of a model, per token, as plain numbers."""

from dataclasses import dataclass
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
