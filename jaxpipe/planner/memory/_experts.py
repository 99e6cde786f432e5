"""What the backward of routed experts computes with, in bytes.

Devices along `expert` gather the tokens of all of them, sort k rows for each token by expert, and
multiply the rows of their own experts. Where backwards compute experts again, tokens run in chunks.

D embed, F width of an expert, k experts of a token, t tokens of a microbatch on a device.
"""

from collections.abc import Collection

from ...models.layers import num_chunks
from .._model import PlannedModel, Sizes, gathered_parameters

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


def work_with_experts(own: float, routed: float, saved: Collection[str]) -> float:
    """Returns the bytes that exist at a time while the backward of a layer runs.

    Returns:
        The larger of both where attention is not computed again before the experts, else the sum.
    """
    if routed and "out_proj" in saved:
        return max(own, routed)
    return own + routed


def routed_bytes(
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


def gathered_token_bytes(model: PlannedModel, sizes: Sizes, tokens: float, itemsize: int) -> float:
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
