"""The work of layers and of a model, per token, as plain numbers."""

from dataclasses import dataclass
from typing import Literal

Split = Literal["column", "row", "expert", "none"]


@dataclass(frozen=True)
class Product:
    """A matrix product of [tokens, k] by [k, n].

    Attributes:
        k: The size of the contracted dim.
        n: The size of the dim that it makes.
        split: How tensor parallelism divides it: the columns of the weight ("column": n), its rows
            ("row": k), or not at all ("none"). Weights of experts ("expert") are divided over
            devices by expert.
        copies: How often a token passes it: the experts that it chooses, else 1.
    """

    k: int
    n: int
    split: Split = "column"
    copies: int | float = 1


@dataclass(frozen=True)
class Attention:
    """The part of attention that grows with the length of a sequence.

    Attributes:
        heads: The number of query heads.
        qk_channels: Channels of a head in queries and keys.
        v_channels: Channels of a head in values.
        kv_channels: Channels of keys and values of all heads together, which context parallelism
            moves.
        window: The positions that a token attends to at most; 0 for all before it.
        fused: Whether scores stay on the chip, as in flash attention.
        whole_square: Whether all T x T scores are computed, also those that the mask removes.
    """

    heads: int
    qk_channels: int
    v_channels: int
    kv_channels: int
    window: int = 0
    fused: bool = True
    whole_square: bool = False

    def positions(self, length: int) -> float:
        """Returns the positions that a token attends to, on average."""
        if self.window and self.window < length:
            return self.window - self.window**2 / (2 * length)
        return length / 2


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes that a token leaves for the backward, by policy of rematerialization.

    Attributes:
        none: If nothing is computed again.
        selective: If the inner attention and cheap elementwise operations are computed again.
        full: If only the layer's input is kept.
    """

    none: int | float
    selective: int | float
    full: int | float


@dataclass(frozen=True)
class LayerWork:
    """The work of one kind of layer per token.

    Attributes:
        name: A name of the kind.
        count: How many layers of this kind follow each other.
        products: Its matrix products with weights.
        attention: Its attention, or None.
        dense_parameters: Weights outside of experts.
        expert_parameters: Weights of all its experts.
        num_experts: Its experts that tokens choose from; 0 if it has none.
        active_experts: The number of experts that a token chooses.
        activations: Bytes kept per token on a device that holds the whole layer.
        elementwise_bytes: Bytes that operations other than products read and write in a forward,
            of those that tensor parallelism divides.
        between_bytes: The same of norms, residuals and dropout, which only sequence parallelism
            divides.
        num_kernels: Operations that a device starts in a forward.
        boundary_bytes: Bytes of a token between layers.
        expert_boundary_bytes: Bytes of a token on its way to one expert.
        weight_bytes: Bytes of a weight while it is gathered.
        row_bytes: The part of `elementwise_bytes` that copies, sorts and sums a token's rows for
            experts.
        inner_row_bytes: The part of `row_bytes` inside of the experts.
    """

    name: str
    count: int
    products: tuple[Product, ...]
    attention: Attention | None
    dense_parameters: int
    expert_parameters: int
    num_experts: int
    active_experts: int
    activations: ActivationBytes
    elementwise_bytes: int | float
    between_bytes: int | float
    num_kernels: int
    boundary_bytes: int | float
    expert_boundary_bytes: int | float = 0
    weight_bytes: float = 2.0
    row_bytes: int | float = 0
    inner_row_bytes: int | float = 0


@dataclass(frozen=True)
class ModelWork:
    """The work of a model per token.

    Attributes:
        layers: The kinds of layers, from the first to the last.
        hidden: The number of channels between layers.
        vocab: Rows of the embedding, and columns of the head.
        embedding_parameters: Weights of the embedding.
        head_parameters: Weights of the head; 0 if it is tied to the embedding.
    """

    layers: tuple[LayerWork, ...]
    hidden: int
    vocab: int
    embedding_parameters: int
    head_parameters: int

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
        """Returns the kind of every layer, from the first to the last.

        Returns:
            [num_layers] kinds.
        """
        return tuple(layer for layer in self.layers for _ in range(layer.count))


def flops_per_token(work: ModelWork, length: int, *, whole_square: bool = False) -> float:
    """Returns the operations of a model's forward and backward per token, as papers count them.

    Every weight that a token is multiplied by counts 6; attention counts the positions before a
    token; rematerialization counts nothing.

    Args:
        whole_square: Whether attention counts all positions, as Megatron's formula does.
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
