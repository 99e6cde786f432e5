"""The sizes on a device of which engines make the memory of a step, by arithmetic on a model."""

import itertools
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from ...engines import (
    LIVE,
    Buffers,
    PeakMemory,
    Sharded,
    StepCounts,
    StepSizes,
    common_sequence,
    loss_bytes,
)
from ...models.layers import num_chunks
from ...schedules import FAMILIES
from ...schedules.language import rank_of_each_stage
from .._candidates import StepLayout
from .._model import (
    OFFLOAD_INPUTS,
    PlannedModel,
    Sizes,
    gathered_parameters,
    largest_weight,
    mesh_sizes,
    stored_parameters,
    token_bytes,
)

_FLOAT32 = 4
_LIVE_ON_CPU = 1.15
"""`LIVE` of XLA:CPU, which fuses less, and computes in float32 whatever the dtype is."""

_ON_THEIR_WAY = 2
"""Inputs of layers that are on the device while others are on their way to the host, or back."""

_COPY_BYTES_HELD = 0.65
"""Bytes for each byte of an expert weight that copies of gathered slices take where these are no
tiles, and whole experts do not: fitted to one pair of programs (docs/compile.md)."""

_EXPANDED = 3.1
"""Arrays of every row for every expert that XLA:GPU holds at a time: its `ragged_dot` is a product
over all experts, of rows that are zero but for one. Where tokens run in chunks it holds less."""

OfRank = tuple[PlannedModel, StepLayout]
"""The model and the layout as a rank has them."""


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
        stored_layer=stored_parameters(model.layer, sizes),
        layer=gathered_parameters(model.layer, sizes),
        largest=largest_weight(model.dense, sizes),
        stored_boundary=stored_parameters(ends, sizes),
        boundary=gathered_parameters(ends, sizes),
        head=gathered_parameters(model.head, sizes),
        outer=gathered_parameters(model.outer, sizes),
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
    if model.wgrad is not None:
        return token_bytes((model.wgrad,), mesh_sizes(mesh), model.activation_bytes)
    unnamed = token_bytes(model.unnamed, mesh_sizes(mesh), model.activation_bytes)
    return _kept_bytes(model, mesh) - unnamed / 2


@lru_cache(maxsize=10_000)
def _past_bytes(model: PlannedModel, mesh: tuple[int, ...]) -> float:
    """Returns the bytes of a token in keys and values, which later slices of a sequence read."""
    tensors = [tensor for name, tensor in model.tensors if name in ("key_proj", "value_proj")]
    tensors = tensors if model.past is None else [model.past]
    return token_bytes(tensors, mesh_sizes(mesh), model.activation_bytes)


@lru_cache(maxsize=10_000)
def _live_bytes(model: PlannedModel, mesh: tuple[int, ...]) -> float:
    """Returns the bytes of a token that exist at a time while the backward of a layer runs."""
    sizes = mesh_sizes(mesh)
    on_cpu = model.platform == "cpu"
    if model.live is not None and not on_cpu:
        return token_bytes((model.live,), sizes, model.activation_bytes)
    itemsize = max(_FLOAT32, model.activation_bytes) if on_cpu else model.activation_bytes
    of_own_tokens = [tensor for tensor in model.saved("none") if not tensor.all_rows]
    every = token_bytes(of_own_tokens, sizes, itemsize)
    share = _LIVE_ON_CPU if on_cpu else LIVE
    expanded = _EXPANDED * token_bytes(model.expanded, sizes, model.activation_bytes)
    return expanded + share * (every + token_bytes(model.scores, sizes, _FLOAT32))


def step_counts(candidate: StepLayout) -> StepCounts:
    """Returns the counts of a layout."""
    return StepCounts(
        num_ranks=candidate.num_ranks,
        chunks=candidate.chunks + candidate.copies,
        num_microbatches=candidate.microbatches,
        gather=candidate.gather if candidate.gathers else None,
        num_calls=candidate.accumulation,
        options=candidate.options,
        most_for_several=candidate.most_for_several,
    )


def peak_memory(
    model: PlannedModel, candidate: StepLayout, tokens: float, buffers: Sequence[Buffers]
) -> PeakMemory:
    """Returns the memory of the fullest device, as the engine of a layout says it.

    Args:
        buffers: The buffers of every rank, or of the fullest one.

    Returns:
        Bytes at the peak of a step, by kind, on the device with the largest total.
    """
    counts = step_counts(candidate)
    sizes = [step_sizes(*of_rank, tokens) for of_rank in ranks(model, candidate)]
    # What all ranks have alike meets what each of them has.
    pair = zip if len(buffers) == len(sizes) else itertools.product
    peaks = (candidate.engine.memory(counts, *of_rank) for of_rank in pair(buffers, sizes))
    return max(peaks, key=attrgetter("total"))


@lru_cache(maxsize=20_000)
def step_sizes(model: PlannedModel, candidate: StepLayout, tokens: float) -> StepSizes:
    """Returns the bytes of which the memory of a layout is made."""
    mesh, on_mesh, policy = candidate.mesh, _on_mesh(model, candidate.mesh), candidate.policy
    n = candidate.layers_per_stage
    layers = n * (candidate.chunks + candidate.copies)
    stored, whole = layers * on_mesh.stored_layer, layers * on_mesh.layer
    of, of_boundary, pipelines = model.of_layers, model.of_boundary, candidate.engine.pipelines
    if not pipelines:  # XLA casts what a layer casts before it gathers it, and before the loop
        of = of._replace(read=model.gathered_bytes)
    weights = of.weight * stored + of_boundary.weight * on_mesh.stored_boundary
    of_layer, of_others = model.state_of_layer, model.state_of_boundary
    updated = n * candidate.chunks * on_mesh.stored_layer  # copies are not updated
    state = of_layer.per_parameter * updated + of_others.per_parameter * on_mesh.stored_boundary
    whole_state = n * candidate.chunks * of_layer.whole + of_others.whole
    replicas = candidate.sizes["data"] if candidate.options.zero1 else 1
    activation = model.input_bytes(tokens, candidate.sizes)
    kept = tokens * _token_bytes(model, mesh, policy)
    logits = tokens * model.vocab / candidate.sizes["tensor"] / candidate.vocab_tiling
    if candidate.options.vocab_parallel:
        logits /= candidate.num_ranks
    is_cast = pipelines or model.hoists_casts
    # XLA:TPU gathers all weights of embedding and head once for all microbatches.
    for_all = model.platform == "tpu" and candidate.microbatches > 1
    outer = on_mesh.boundary if for_all else on_mesh.outer
    reads_head = 0.0 if for_all or not candidate.gathers else on_mesh.head or on_mesh.boundary
    keeps_gathered = policy == "none" and not pipelines
    head_grads = of_boundary.gradient * on_mesh.head
    past = tokens * n * _past_bytes(model, mesh)
    return StepSizes(
        weights=weights,
        optimizer=state / replicas + whole_state,
        grads=Sharded(of.gradient * stored / replicas, of.gradient * whole),
        reads=Sharded(of.read * stored, of.read * whole),
        casts=Sharded(of.cast * stored * is_cast, of.cast * whole),
        boundary_grads=Sharded(
            of_boundary.gradient * on_mesh.stored_boundary, of_boundary.gradient * on_mesh.boundary
        ),
        boundary_read=of_boundary.read * on_mesh.boundary,
        boundary_cast=of_boundary.cast * on_mesh.stored_boundary,
        head_grads=head_grads,
        call_grads=weights,
        layer_read=of.read * on_mesh.layer,
        largest_grad=of.gradient * on_mesh.largest,
        activation=activation,
        residuals=_residuals(model, candidate, tokens, activation, kept),
        wgrad_residuals=n * tokens * _wgrad_bytes(model, mesh),
        work=_work(model, candidate, tokens, activation),
        loss=loss_bytes(logits, model.logit_bytes),
        past=past,
        past_cotangent=past * max(1.0, _FLOAT32 / model.activation_bytes),
        head_read=of_boundary.read * reads_head,
        outer_read=of_boundary.read * outer,
        outer_residuals=model.num_outer * (activation + kept),
        kept_read=of.read * whole * keeps_gathered,
    )


def _residuals(
    model: PlannedModel, candidate: StepLayout, tokens: float, activation: float, kept: float
) -> float:
    """Returns the bytes that a stage stores of a microbatch for its backward."""
    n = candidate.layers_per_stage
    masked = _masked_weights(model, candidate)
    if candidate.policy == OFFLOAD_INPUTS:
        return 0.0 if candidate.engine.pipelines else _ON_THEIR_WAY * activation
    if candidate.scope == "layer":
        return n * (activation + kept) + masked
    passed_on = tokens * _passed_on_bytes(model, candidate.mesh, candidate.policy)
    # A policy that saves the inputs of layers recomputes nothing from what is passed on.
    if model.saves_inputs(candidate.policy):
        passed_on = activation
    return activation + n * kept + (n - 1) * passed_on + masked


def _masked_weights(model: PlannedModel, candidate: StepLayout) -> float:
    """Returns the bytes of weights that a visit keeps: those of layers that a mask may skip.

    With rematerialization they are read again.
    """
    if len(set(candidate.counts)) == 1 or candidate.policy != "none":
        return 0.0
    on_mesh, n = _on_mesh(model, candidate.mesh), candidate.layers_per_stage
    if candidate.gather == "layer" and candidate.gathers:
        return model.of_layers.weight * n * on_mesh.stored_layer
    return model.of_layers.read * n * on_mesh.layer


def _work(model: PlannedModel, candidate: StepLayout, tokens: float, activation: float) -> float:
    """Returns the bytes that the backward of a stage computes with and computes again.

    The mask of a layer returns the weights that its backward reads.
    """
    mesh, n, policy = candidate.mesh, candidate.layers_per_stage, candidate.policy
    itemsize = max(_FLOAT32 if model.platform == "cpu" else 0, model.activation_bytes)
    live = tokens * _live_bytes(model, mesh)
    pipelines = candidate.engine.pipelines
    routed = _routed_bytes(model, candidate.sizes, policy, tokens, itemsize, pipelines=pipelines)
    work = _work_with_experts(live, routed, model.saved_names(policy))
    if policy == "none":
        return work
    if candidate.whole_experts and candidate.cuts_tiles:
        weight = model.of_layers.read * largest_weight(model.experts, candidate.sizes)
        work -= _COPY_BYTES_HELD * weight
    if policy == OFFLOAD_INPUTS and pipelines:
        # Schedules move the inputs of a stage at a time, as no conditional moves any.
        work += _ON_THEIR_WAY * (n if candidate.engine.runs_schedules else 1) * activation
    layers = n if candidate.scope == "tick" else 1
    if len(set(candidate.counts)) > 1:
        work += layers * model.of_layers.weight * _on_mesh(model, mesh).layer
    if n == 1 or candidate.scope == "layer":
        return work
    if candidate.scope == "both":
        return work + n * activation
    tokens_of_all = _gathered_token_bytes(model, candidate.sizes, tokens, itemsize)
    return work + (n - 1) * (live + tokens_of_all)


def ranks(model: PlannedModel, candidate: StepLayout) -> tuple[OfRank, ...]:
    """Returns the model and the layout as each rank has them; one pair if all have the same.

    If layers differ, those of the model that is returned are the means of what the rank has.
    """
    if not model.layer_sizes:
        return ((model, candidate),)
    family = FAMILIES.get(candidate.schedule)
    placement = family.placement if family else "loop"
    one_program = not candidate.engine.program_per_rank
    counts, models = _ranks(model, one_program, placement, candidate.num_ranks, candidate.counts)
    layout = candidate._replace(counts=counts)
    return tuple((of_rank, layout) for of_rank in models)


@lru_cache(maxsize=1000)
def _ranks(
    model: PlannedModel, one_program: bool, placement: str, S: int, counts: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[PlannedModel, ...]]:
    """Returns layers of every stage, of the longest its slots, and models of ranks."""
    ends = [0, *accumulate(counts)]
    stages = [
        model.layer_sizes[end - count : end] for end, count in zip(ends[1:], counts, strict=True)
    ]
    sizes = {layer.kind: layer for layer in model.layer_sizes}
    if one_program:
        slots = [sizes[kind] for kind in common_sequence([[x.kind for x in s] for s in stages])]
        longest = counts.index(max(counts))
        with_slots = (*counts[:longest], len(slots), *counts[longest + 1 :])
        return with_slots, (model.with_means([slots], len(slots)),)
    if placement == "both_ways":
        own = [[stages[rank], stages[S - 1 - rank]] for rank in range(S)]
    else:
        on_ranks = rank_of_each_stage(placement, S, len(counts) // S)
        own = [[s for s, at in zip(stages, on_ranks, strict=True) if at == r] for r in range(S)]
    return counts, tuple(model.with_means(of_rank, max(counts)) for of_rank in own)


_IN_ACTIVATION, _IN_WEIGHTS = (5, 3), (3, 1)
"""Arrays of [rows, D] and of [rows, F] that exist at a time: while activations are computed again
and differentiated, and while gradients of weights are."""

_IN_CHUNK = (3, 3)
"""The same of a chunk of tokens, whose products add gradients to sums."""

_TILE = (8, 128)
"""Rows and columns of a tile of a TPU's memory."""

_TOKENS = 3
"""Arrays of [tokens, D]: tokens, their cotangents, and what returns to them."""

_NAMES = frozenset(("moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo"))


def _work_with_experts(own: float, routed: float, saved: Collection[str]) -> float:
    """Returns the bytes that exist at a time while the backward of a layer runs.

    Returns:
        The larger of both where attention is not computed again before the experts, else the sum.
    """
    if routed and "out_proj" in saved:
        return max(own, routed)
    return own + routed


def _routed_bytes(
    model: PlannedModel, sizes: Sizes, policy: str, tokens: float, itemsize: int, *, pipelines: bool
) -> float:
    """Returns the bytes that exist at a time while the backward of a layer's experts runs.

    Chunks of FSDP are fitted to nine programs of TPUs, and two of GPUs agree; pipelines hold more.
    """
    if model.routed is None:
        return 0.0
    gathered = tokens * sizes["expert"]
    chunks = _expert_chunks(model, sizes, policy, tokens)
    rows = gathered * model.routed.chosen / chunks
    width = model.routed.width / sizes["tensor"]
    early, late, chunk = (
        itemsize * rows * (outer * model.hidden + inner * width)
        for outer, inner in (_IN_ACTIVATION, _IN_WEIGHTS, _IN_CHUNK)
    )
    gradients = model.of_layers.read * gathered_parameters(model.experts, sizes)
    tokens_of_all = itemsize * _TOKENS * gathered * model.hidden
    if chunks == 1:
        return tokens_of_all + max(early, late + gradients)
    if pipelines:
        return gradients + tokens_of_all + max(early, late)
    copies = _bytes_of_copies(model, sizes) if model.platform == "tpu" else 0.0
    return gradients + tokens_of_all + chunk + copies


def _bytes_of_copies(model: PlannedModel, sizes: Sizes) -> float:
    """Returns the bytes of copies that XLA:TPU makes of gathered experts, to have them in tiles.

    Of down projections [F, D] a device has columns, and rows of the two others, [D, F].
    """
    parts = sizes["fsdp"] * sizes["context"]
    if parts == 1 or sizes["tensor"] > 1:
        return 0.0
    rows, columns = (model.hidden % (parts * size) != 0 for size in _TILE)
    whole = model.of_layers.read * gathered_parameters(model.experts, sizes)
    return (2 * rows + columns) / 3 * whole


def _gathered_token_bytes(model: PlannedModel, sizes: Sizes, tokens: float, itemsize: int) -> float:
    """Returns the bytes of the tokens that the experts of a device gather."""
    return 0.0 if model.routed is None else itemsize * tokens * sizes["expert"] * model.hidden


def _expert_chunks(model: PlannedModel, sizes: Sizes, policy: str, tokens: float) -> int:
    """Returns the chunks in which the experts of a layer run the tokens that devices gather."""
    if model.routed is None:
        return 1
    if policy == "none" or not _NAMES.isdisjoint(model.saved_names(policy)):
        return 1
    gathered, routed = int(tokens * sizes["expert"]), model.routed
    return num_chunks(gathered, gathered * routed.chosen // (routed.num * routed.chunk_rows))
