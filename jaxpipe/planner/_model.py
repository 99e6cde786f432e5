"""A model as a planner sees it: how its weights are split over devices, and what a layer keeps.

D embed, F width of an expert, V vocab.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from ..autodiff.backward import saved_names
from ..sharding import AXES

OFFLOAD_INPUTS = "offload_inputs"
"""The policy that keeps the input of a layer, and no more, in the memory of the host."""

_UNREAD = frozenset(("mlpwo",))
"""Tensors that policies name and no backward reads, as they are only added to others: compilers
store none of them."""

_LAYER_INPUT = "decoder_layer_input"

Axes = tuple[str, ...]
"""Names of mesh axes."""

Sizes = Mapping[str, int]
"""The size of every mesh axis."""


@dataclass(frozen=True)
class WeightGroup:
    """Weights that the same mesh axes split.

    Attributes:
        parameters: The number of parameters; a mean may be none.
        stored: Mesh axes that split them as they are stored.
        gathered: Mesh axes that still split them when a layer reads them.
        largest: The number of parameters of the largest weight.
    """

    parameters: float
    stored: Axes
    gathered: Axes
    largest: int


@dataclass(frozen=True)
class Tensor:
    """A tensor that the forward of a layer makes for every token.

    Attributes:
        channels: Elements for each token.
        axes: Mesh axes that split them.
        all_rows: Whether devices along `expert` each have the tokens of all of these.
    """

    channels: float
    axes: Axes = ()
    all_rows: bool = False


class RoutedExperts(NamedTuple):
    """The routed experts of a layer.

    Attributes:
        num: How many there are.
        chosen: How many of them a token chooses.
        width: F, the width of one.
        chunk_rows: Rows of each expert, on average, in a chunk of tokens, where backwards compute
            experts again.
    """

    num: int
    chosen: int
    width: int
    chunk_rows: int


class WeightBytes(NamedTuple):
    """Bytes of a parameter.

    Attributes:
        weight: Bytes of the parameter as it is stored.
        gradient: Bytes of the sum of its gradients.
        read: Bytes of the parameter as layers read it.
    """

    weight: float
    gradient: float
    read: float

    @property
    def cast(self) -> float:
        """Returns the bytes of a copy in the dtype that layers read; 0 if none is made."""
        return self.read if self.read != self.weight else 0.0


class StateBytes(NamedTuple):
    """Bytes of an optimizer's state for the weights of a layer, or of embedding and head.

    Attributes:
        per_parameter: Bytes for each parameter that are sharded as it is, such as moments.
        whole: Bytes for all of them together that every device has, such as sums of rows.
    """

    per_parameter: float
    whole: float = 0.0


class LayerSizes(NamedTuple):
    """The sizes of a layer of a model whose layers differ.

    Attributes:
        kind: The name of its kind.
        parameters: The number of its parameters.
        largest: The number of parameters of its largest weight.
        kept: Elements that its forward stores of a token, if nothing is computed again.
        wgrad: Elements that its I stores of a token for its W.
        live: Elements of a token that exist at a time while its backward runs.
    """

    kind: str
    parameters: int
    largest: int
    kept: float
    wgrad: float
    live: float


@dataclass(frozen=True, eq=False)
class PlannedModel:
    """The sizes of a model that decide memory.

    Attributes:
        name: The name of the model.
        layer: The weights of one layer of the pipeline.
        embed: The weights before the pipeline.
        head: The weights of the head.
        num_layers: L, the layers that a pipeline may have.
        hidden: D, the channels between layers.
        vocab: V; 0 if the loss makes no logits.
        of_layers: Bytes of a parameter of the layers.
        of_boundary: Bytes of one of the embedding and the head.
        state_of_layer: Bytes of the optimizer's state for a layer.
        state_of_boundary: The same bytes for the embedding and the head.
        gathered_bytes: Bytes of a parameter of the layers as it is gathered.
        activation_bytes: Bytes of an element of activations.
        platform: The platform whose compiler compiles it, "tpu", "gpu" or "cpu".
        hoists_casts: Whether it casts the weights of all layers before the loop over layers.
        outer: The weights of layers among `embed` and `head`, all of them.
        num_outer: The number of these layers.
        tensors: Tensors that a layer makes for every token, by name.
        unnamed: Other tensors that it makes, which only the policy `none` keeps.
        scores: Scores of attention in float32, if it stores them; only `none` keeps them.
        routed: The routed experts of a layer, if it has any.
        expanded: Rows of a token for every expert, where grouped products have no kernel.
        locations: The location of each tensor, for the policy `custom`.
        wgrad: The tensor that I leaves for W; None: the named tensors, and half of the others.
        live: The tensor that exists at a time in the backward of a layer; None: a part of those
            that it keeps.
        layer_sizes: [L] the sizes of each layer, if they differ: then others are means of them.
        past: The tensor that a layer carries for later slices of its sequence; None: the named keys
            and values.
        logit_bytes: Bytes of a logit as the head makes it.
        between: Mesh axes that divide the tokens between products, beside those of rows and
            `context`.
    """

    name: str
    layer: tuple[WeightGroup, ...]
    embed: tuple[WeightGroup, ...]
    head: tuple[WeightGroup, ...]
    num_layers: int
    hidden: int
    vocab: int
    of_layers: WeightBytes
    of_boundary: WeightBytes
    state_of_layer: StateBytes
    state_of_boundary: StateBytes
    gathered_bytes: float
    activation_bytes: int
    platform: str
    hoists_casts: bool
    outer: tuple[WeightGroup, ...] = ()
    num_outer: int = 0
    tensors: tuple[tuple[str, Tensor], ...] = ()
    unnamed: tuple[Tensor, ...] = ()
    scores: tuple[Tensor, ...] = ()
    routed: RoutedExperts | None = None
    expanded: tuple[Tensor, ...] = ()
    locations: tuple[tuple[str, str], ...] = ()
    wgrad: Tensor | None = None
    live: Tensor | None = None
    layer_sizes: tuple[LayerSizes, ...] = ()
    past: Tensor | None = None
    logit_bytes: int = 4
    between: Axes = ()

    def input_bytes(self, tokens: float, sizes: Sizes) -> float:
        """Returns the bytes of a layer's input on a device, of so many tokens of a microbatch."""
        return self.activation_bytes * self.hidden * tokens / split(self.between, sizes)

    @property
    def experts(self) -> tuple[WeightGroup, ...]:
        """Returns the weights of the routed experts of one layer."""
        return tuple(group for group in self.layer if "expert" in group.gathered)

    @property
    def dense(self) -> tuple[WeightGroup, ...]:
        """Returns the other weights of one layer."""
        return tuple(group for group in self.layer if "expert" not in group.gathered)

    def with_means(self, stages: Sequence[Sequence[LayerSizes]], most: int) -> "PlannedModel":
        """Returns a model whose equal layers, `most` in each stage, are as large as `stages`."""
        every = [layer for stage in stages for layer in stage]
        group = replace(
            self.layer[0],
            parameters=sum(layer.parameters for layer in every) / (len(stages) * most),
            largest=max((layer.largest for layer in every), default=0),
        )
        kept, wgrad, live = (
            Tensor(max(sum(getattr(layer, name) for layer in stage) for stage in stages) / most)
            for name in ("kept", "wgrad", "live")
        )
        return replace(self, layer=(group,), unnamed=(kept,), wgrad=wgrad, live=live)

    def saved_names(self, policy: str) -> tuple[str, ...]:
        """Returns the names of tensors that a policy saves on the device; () for `none`."""
        return () if policy == OFFLOAD_INPUTS else saved_names(policy, dict(self.locations))[0]

    def saved(self, policy: str) -> tuple[Tensor, ...]:
        """Returns the tensors that a layer keeps for its backward beside its input."""
        if policy == "none":
            return (*(tensor for _, tensor in self.tensors), *self.unnamed)
        names = self.saved_names(policy)
        return tuple(tensor for name, tensor in self.read if name in names)

    def passed_on(self, policy: str) -> tuple[Tensor, ...]:
        """Returns the tensors that a layer keeps, beside `saved`, to recompute the next one."""
        unread = _UNREAD.intersection(self.saved_names(policy))
        return tuple(tensor for name, tensor in self.tensors if name in unread)

    def saves_inputs(self, policy: str) -> bool:
        """Returns whether a policy saves what enters the later layers of a stage, too."""
        return _LAYER_INPUT in self.saved_names(policy)

    @property
    def read(self) -> tuple[tuple[str, Tensor], ...]:
        """Returns the named tensors that a backward reads."""
        return tuple(pair for pair in self.tensors if pair[0] not in _UNREAD)


@lru_cache(maxsize=10_000)
def mesh_sizes(mesh: tuple[int, ...]) -> Sizes:
    """Returns the size of every mesh axis, from sizes in the order of `AXES`."""
    return MappingProxyType({str(axis): size for axis, size in zip(AXES, mesh, strict=True)})


def split(axes: Iterable[str], sizes: Sizes) -> int:
    """Returns into how many parts these mesh axes split an array."""
    return math.prod(sizes[axis] for axis in axes)


def stored_parameters(groups: Iterable[WeightGroup], sizes: Sizes) -> float:
    """Returns the parameters of a device, as they are stored."""
    return sum(group.parameters / split(group.stored, sizes) for group in groups)


def gathered_parameters(groups: Iterable[WeightGroup], sizes: Sizes) -> float:
    """Returns the parameters of a device while a layer reads them."""
    return sum(group.parameters / split(group.gathered, sizes) for group in groups)


def largest_weight(groups: Iterable[WeightGroup], sizes: Sizes) -> float:
    """Returns the parameters of the largest weight while a layer reads it, on a device."""
    return max((group.largest / split(group.gathered, sizes) for group in groups), default=0.0)


def token_bytes(tensors: Iterable[Tensor], sizes: Sizes, itemsize: int) -> float:
    """Returns the bytes of tensors for each token of a device."""
    return itemsize * sum(
        tensor.channels / split(tensor.axes, sizes) * (sizes["expert"] if tensor.all_rows else 1)
        for tensor in tensors
    )
