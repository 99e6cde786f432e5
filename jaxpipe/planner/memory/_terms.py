"""What the memory of all engines is made of: weights, tensors of a layer, and its work, in bytes.

t tokens of a microbatch on a device.
"""

from functools import lru_cache
from typing import NamedTuple

from .._candidates import StepLayout
from .._model import (
    PlannedModel,
    WeightBytes,
    gathered_parameters,
    largest_weight,
    mesh_sizes,
    stored_parameters,
    token_bytes,
)
from ._experts import gathered_token_bytes, routed_bytes, work_with_experts

_FLOAT32 = 4

_LIVE = 0.8
"""What of the tensors of a layer exists at a time while its backward runs."""

_LIVE_ON_CPU = 1.15
"""The same of XLA:CPU, which fuses less, and computes in float32 whatever the dtype is."""

_EXPANDED = 3.1
"""Arrays of every row for every expert that XLA:GPU holds at a time: its `ragged_dot` is a product
over all experts, of rows that are zero but for one. Where tokens run in chunks it holds less."""

_LOGITS = 1.25
"""Float32 arrays as large as the logits. These and their cotangents are in part bfloat16, and in
part never stored."""


class MemoryTerms(NamedTuple):
    """Numbers of which the memory of every engine is made: counts of parameters, and bytes.

    `stored` and `whole` are parameters of the layers of a rank, as stored and as read, `boundary`
    and `whole_boundary` those before and after the pipeline, `head` and `outer` those of the head
    and of layers among these as read, `layer` those of one layer as read. `layer_again` is what a
    layer has computed again when the next one runs.
    """

    stored: float
    whole: float
    layer: float
    boundary: float
    whole_boundary: float
    head: float
    outer: float
    activation: float
    kept: float
    passed_on: float
    layer_work: float
    layer_again: float
    for_weights: float
    loss: float
    largest: float
    of_layers: WeightBytes
    of_boundary: WeightBytes

    @property
    def stored_grads(self) -> float:
        """Returns the bytes of sums of gradients of all weights, as these are stored."""
        return self.of_layers.gradient * self.stored + self.of_boundary.gradient * self.boundary


class _OnMesh(NamedTuple):
    """Parameters of a device on a mesh: of one layer and of embedding and head.

    Each as stored and as read, with the largest weight of the layer.
    """

    stored_layer: float
    layer: float
    largest: float
    stored_boundary: float
    boundary: float
    head: float
    outer: float


@lru_cache(maxsize=10_000)
def _on_mesh(model: PlannedModel, mesh: tuple[int, ...]) -> _OnMesh:
    sizes, ends = mesh_sizes(mesh), (*model.embed, *model.head)
    return _OnMesh(
        stored_parameters(model.layer, sizes),
        gathered_parameters(model.layer, sizes),
        largest_weight(model.dense, sizes),
        stored_parameters(ends, sizes),
        gathered_parameters(ends, sizes),
        gathered_parameters(model.head, sizes),
        gathered_parameters(model.outer, sizes),
    )


@lru_cache(maxsize=10_000)
def _token_bytes(model: PlannedModel, mesh: tuple[int, ...], policy: str) -> float:
    """Returns the bytes of a token that a layer keeps beside its input."""
    sizes = mesh_sizes(mesh)
    scores = token_bytes(model.scores, sizes, _FLOAT32) if policy == "none" else 0.0
    return token_bytes(model.saved(policy), sizes, model.activation_bytes) + scores


@lru_cache(maxsize=10_000)
def _passed_on_bytes(model: PlannedModel, mesh: tuple[int, ...], policy: str) -> float:
    """Returns the bytes of a token that a layer keeps for the next one to be computed again."""
    return token_bytes(model.passed_on(policy), mesh_sizes(mesh), model.activation_bytes)


@lru_cache(maxsize=10_000)
def _kept_bytes(model: PlannedModel, mesh: tuple[int, ...]) -> float:
    """Returns the bytes of a token in all tensors of a layer but scores."""
    return token_bytes(model.saved("none"), mesh_sizes(mesh), model.activation_bytes)


def _wgrad_bytes(model: PlannedModel, mesh: tuple[int, ...]) -> float:
    """Returns the bytes of a token in the inputs of a layer's products and in their cotangents.

    A tensor with a name is what a product with weights makes, or reads. Of those without a name
    products read half: of a norm and what is normalized, of an activation and its product.
    """
    unnamed = token_bytes(model.unnamed, mesh_sizes(mesh), model.activation_bytes)
    return _kept_bytes(model, mesh) - (unnamed / 2 if model.tensors else 0.0)


@lru_cache(maxsize=10_000)
def _live_bytes(model: PlannedModel, mesh: tuple[int, ...]) -> float:
    """Returns the bytes of a token that exist at a time while the backward of a layer runs."""
    sizes = mesh_sizes(mesh)
    itemsize = max(_FLOAT32, model.activation_bytes) if model.on_cpu else model.activation_bytes
    every = token_bytes(model.own_rows("none"), sizes, itemsize)
    share = _LIVE_ON_CPU if model.on_cpu else _LIVE
    expanded = _EXPANDED * token_bytes(model.expanded, sizes, model.activation_bytes)
    return expanded + share * (every + token_bytes(model.scores, sizes, _FLOAT32))


def memory_terms(model: PlannedModel, candidate: StepLayout, tokens: float) -> MemoryTerms:
    """Returns the terms that add up to the memory of a layout."""
    mesh, sizes = candidate.mesh, _on_mesh(model, candidate.mesh)
    itemsize = max(_FLOAT32 if model.on_cpu else 0, model.activation_bytes)
    experts = candidate.sizes, candidate.policy, tokens, itemsize
    work = tokens * _live_bytes(model, mesh)
    layers = candidate.layers_per_stage * candidate.chunks
    logits = _FLOAT32 * tokens * model.vocab / candidate.sizes["tensor"] / candidate.vocab_tiling
    return MemoryTerms(
        layers * sizes.stored_layer,
        layers * sizes.layer,
        sizes.layer,
        sizes.stored_boundary,
        sizes.boundary,
        sizes.head,
        sizes.outer,
        model.activation_bytes * model.hidden * tokens,
        tokens * _token_bytes(model, mesh, candidate.policy),
        tokens * _passed_on_bytes(model, mesh, candidate.policy),
        work_with_experts(work, routed_bytes(model, *experts), candidate.policy),
        work + gathered_token_bytes(model, candidate.sizes, tokens, itemsize),
        tokens * _wgrad_bytes(model, mesh),
        _LOGITS * logits,
        model.of_layers.gradient * sizes.largest,
        model.of_layers,
        model.of_boundary,
    )
