"""A model as a planner sees it: how its weights are split over devices, and what a layer keeps.

D embed, H query heads, K key and value heads, C channels of a head, F width of an MLP, V vocab.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..autodiff.backward import saved_names
from ..models import DeepseekConfig, LlamaConfig
from ..models.weights import is_weight
from ..sharding import AXES, DEFAULT_RULES, Rules, gathered_rules, partition_spec
from ..sharding.specs import axes_of_dim
from ..train.plan import MODEL_FAMILIES, ModelConfig

_FLOAT32 = 4
_UNREAD = frozenset(("mlpwo",))
"""Tensors that policies name and no backward reads, as they are only added to others: compilers
store none of them."""

_SCORES = 2
"""Arrays of scores that attention without a kernel stores, in float32: scores and their softmax."""

Axes = tuple[str, ...]
"""Names of mesh axes."""

Sizes = Mapping[str, int]
"""The size of every mesh axis."""


@dataclass(frozen=True)
class WeightGroup:
    """Weights that the same mesh axes split.

    Attributes:
        parameters: The number of parameters.
        stored: Mesh axes that split them as they are stored.
        gathered: Mesh axes that still split them when a layer reads them.
        largest: The number of parameters of the largest weight.
    """

    parameters: int
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

    channels: int
    axes: Axes = ()
    all_rows: bool = False


class RoutedExperts(NamedTuple):
    """The routed experts of a layer.

    Attributes:
        num: How many there are.
        chosen: How many of them a token chooses.
        width: F, the width of one.
    """

    num: int
    chosen: int
    width: int


class WeightBytes(NamedTuple):
    """Bytes of a parameter.

    Attributes:
        weight: Bytes of the parameter as it is stored, and of each moment of the optimizer.
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


@dataclass(frozen=True, eq=False)
class PlannedModel:
    """The sizes of a model that decide memory.

    Attributes:
        name: The name of the model.
        layer: The weights of one layer of the pipeline.
        embed: The weights before the pipeline.
        head: The weights of the head.
        num_layers: L, the layers that a pipeline may have.
        outer: The weights of layers among `embed` and `head`, all of them.
        num_outer: The number of these layers.
        hidden: D, the channels between layers.
        vocab: V; 0 if the loss makes no logits.
        tensors: Tensors that a layer makes for every token, by name.
        unnamed: Other tensors that it makes, which only the policy `none` keeps.
        scores: Scores of attention in float32, if it stores them; only `none` keeps them.
        routed: The routed experts of a layer, if it has any.
        expanded: Rows of a token for every expert, where grouped products have no kernel.
        of_layers: Bytes of a parameter of the layers.
        of_boundary: Bytes of one of the embedding and the head.
        gathered_bytes: Bytes of a parameter of the layers as it is gathered.
        activation_bytes: Bytes of an element of activations.
        on_cpu: Whether XLA:CPU compiles it.
        hoists_gathers: Whether the compiler moves gathers out of the loop over microbatches.
        hoists_casts: Whether it casts the weights of all layers before the loop over layers.
    """

    name: str
    layer: tuple[WeightGroup, ...]
    embed: tuple[WeightGroup, ...]
    head: tuple[WeightGroup, ...]
    outer: tuple[WeightGroup, ...]
    num_outer: int
    num_layers: int
    hidden: int
    vocab: int
    tensors: tuple[tuple[str, Tensor], ...]
    unnamed: tuple[Tensor, ...]
    scores: tuple[Tensor, ...]
    routed: RoutedExperts | None
    expanded: tuple[Tensor, ...]
    of_layers: WeightBytes
    of_boundary: WeightBytes
    gathered_bytes: float
    activation_bytes: int
    on_cpu: bool
    hoists_gathers: bool
    hoists_casts: bool

    @property
    def experts(self) -> tuple[WeightGroup, ...]:
        """Returns the weights of the routed experts of one layer."""
        return tuple(group for group in self.layer if "expert" in group.gathered)

    @property
    def dense(self) -> tuple[WeightGroup, ...]:
        """Returns the other weights of one layer."""
        return tuple(group for group in self.layer if "expert" not in group.gathered)

    def own_rows(self, policy: str) -> tuple[Tensor, ...]:
        """Returns those of `saved` that a device has of its own tokens alone."""
        return tuple(tensor for tensor in self.saved(policy) if not tensor.all_rows)

    def saved(self, policy: str) -> tuple[Tensor, ...]:
        """Returns the tensors that a layer keeps for its backward beside its input."""
        if policy == "none":
            return (*(tensor for _, tensor in self.tensors), *self.unnamed)
        names, _ = saved_names(policy)
        return tuple(tensor for name, tensor in self.read if name in names)

    def passed_on(self, policy: str) -> tuple[Tensor, ...]:
        """Returns the tensors that a layer keeps, beside `saved`, to recompute the next one."""
        if policy == "none":
            return ()
        names, _ = saved_names(policy)
        unread = _UNREAD.intersection(names)
        return tuple(tensor for name, tensor in self.tensors if name in unread)

    @property
    def read(self) -> tuple[tuple[str, Tensor], ...]:
        """Returns the named tensors that a backward reads."""
        return tuple(pair for pair in self.tensors if pair[0] not in _UNREAD)


def mesh_sizes(mesh: Iterable[int]) -> dict[str, int]:
    """Returns the size of every mesh axis, from sizes in the order of `AXES`."""
    return {str(axis): size for axis, size in zip(AXES, mesh, strict=True)}


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
    return max(group.largest / split(group.gathered, sizes) for group in groups)


def token_bytes(tensors: Iterable[Tensor], sizes: Sizes, itemsize: int) -> float:
    """Returns the bytes of tensors for each token of a device."""
    return itemsize * sum(
        tensor.channels / split(tensor.axes, sizes) * (sizes["expert"] if tensor.all_rows else 1)
        for tensor in tensors
    )


def planned_model(
    name: str,
    block: str,
    sizes: ModelConfig,
    num_pipelined: int,
    *,
    dtypes: tuple[str, str],
    scores_length: int,
    on_cpu: bool,
    on_gpu: bool,
    grouped_kernel: bool,
) -> PlannedModel:
    """Returns a model of the trainer as a planner sees it.

    Args:
        scores_length: Tokens of a sequence if attention stores its scores; 0 if it does not.
    """
    uniform = sizes.base_num_decoder_layers - getattr(sizes, "first_num_dense_layers", 0)
    tree = MODEL_FAMILIES[block].weights(sizes, layers_after=uniform - num_pipelined)
    on_tpu = not (on_cpu or on_gpu)
    named, unnamed = _tensors(sizes, _LANES if on_tpu else 1)
    outer = [tree[name].get("layers", {}) for name in ("embed", "head")]
    stored, read = (jnp.dtype(dtype).itemsize for dtype in dtypes)
    weight_bytes = WeightBytes(stored, max(_FLOAT32, stored), read)
    scores = _SCORES * scores_length * sizes.base_num_query_heads
    return PlannedModel(
        name,
        _groups(tree["layer"], DEFAULT_RULES),
        _groups(tree["embed"], DEFAULT_RULES),
        _groups(tree["head"], DEFAULT_RULES),
        _groups(outer, DEFAULT_RULES),
        sizes.base_num_decoder_layers - num_pipelined,
        num_pipelined,
        sizes.base_emb_dim,
        sizes.vocab_size,
        tuple(named.items()),
        unnamed,
        (Tensor(scores, _SPLIT),) if scores else (),
        _routed(sizes),
        _expanded(sizes) if on_gpu and not grouped_kernel else (),
        weight_bytes,
        weight_bytes,
        read,
        read,
        on_cpu,
        hoists_gathers=on_tpu,
        hoists_casts=not on_gpu,
    )


def _groups(tree: PyTree, rules: Rules) -> tuple[WeightGroup, ...]:
    """Returns the weights of a tree, those together that the same axes split."""
    sizes_by_axes: dict[tuple[Axes, Axes], list[int]] = {}
    for weight in jax.tree.leaves(tree, is_leaf=is_weight):
        stored, gathered = (
            _spec_axes(weight.axes, axis_rules) for axis_rules in (rules, gathered_rules(rules))
        )
        sizes_by_axes.setdefault((stored, gathered), []).append(math.prod(weight.shape))
    return tuple(
        WeightGroup(sum(sizes), stored, gathered, max(sizes))
        for (stored, gathered), sizes in sizes_by_axes.items()
    )


def _spec_axes(axes: Any, rules: Rules) -> Axes:
    return tuple(axis for dim in partition_spec(axes, rules) for axis in axes_of_dim(dim))


_SPLIT = ("tensor",)

_LANES = 128
"""Elements of the last dim of an array that a TPU stores together: dims are padded to a multiple.
Kernels of attention want the channels of a head there."""


def _tensors(sizes: ModelConfig, lanes: int) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """Returns the tensors that a layer makes for every token: by name, and those without one.

    Channels of a head are padded to a multiple of `lanes`.
    """

    def padded(channels: int) -> int:
        return -(-channels // lanes) * lanes

    D, F = sizes.base_emb_dim, sizes.base_mlp_dim
    named = {"out_proj": Tensor(D)}
    match sizes:
        case LlamaConfig():
            _, H, K, C = sizes.attention
            C = padded(C)
            named |= _heads(H * C, K * C, K * C, H * C)
            named |= _mlp(D, F)
            return named, (Tensor(4 * D), Tensor(2 * F, _SPLIT))
        case DeepseekConfig():
            at, moe = sizes.attention, sizes.moe
            H = at.num_heads
            keys, values = H * padded(at.head_dim), H * padded(at.v_head_dim)
            named |= _heads(keys, keys, values, values)
            named |= {"mla_q": Tensor(at.q_lora_rank), "mla_kv": Tensor(at.kv_lora_rank)}
            if moe.shared_experts:
                named |= _mlp(D, moe.shared_experts * moe.expert_dim)
            k, F = moe.router.num_chosen, moe.expert_dim
            for name in ("moe_mlpwi_0", "moe_mlpwi_1"):
                named[name] = Tensor(k * F, _SPLIT, all_rows=True)
            named["moe_mlpwo"] = Tensor(k * D, all_rows=True)
            return named, (Tensor(4 * D), Tensor(2 * k * D, all_rows=True))


def _routed(sizes: ModelConfig) -> RoutedExperts | None:
    if not isinstance(sizes, DeepseekConfig):
        return None
    moe = sizes.moe
    return RoutedExperts(moe.num_experts, moe.router.num_chosen, moe.expert_dim)


def _expanded(sizes: ModelConfig) -> tuple[Tensor, ...]:
    """Returns the rows that XLA:GPU makes of a token's: one of each choice for every expert."""
    if not isinstance(sizes, DeepseekConfig):
        return ()
    moe = sizes.moe
    return (Tensor(moe.num_experts * moe.router.num_chosen * sizes.base_emb_dim),)


def _heads(queries: int, keys: int, values: int, context: int) -> dict[str, Tensor]:
    names = ("query_proj", "key_proj", "value_proj", "context")
    sizes = (queries, keys, values, context)
    return {name: Tensor(size, _SPLIT) for name, size in zip(names, sizes, strict=True)}


def _mlp(D: int, F: int) -> dict[str, Tensor]:
    return {"mlpwi_0": Tensor(F, _SPLIT), "mlpwi_1": Tensor(F, _SPLIT), "mlpwo": Tensor(D)}
