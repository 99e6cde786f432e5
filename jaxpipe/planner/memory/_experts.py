"""What the backward of routed experts computes with, in bytes.

Devices along `expert` gather the tokens of all of them, sort k rows for each token by expert, and
multiply the rows of their own experts. Where backwards compute experts again, tokens run in chunks.

D embed, F width of an expert, k experts of a token, t tokens of a microbatch on a device.
"""

from ...autodiff.backward import saved_names
from ...models.layers._routed_experts import num_chunks
from ...train.plan._model import CHUNK_ROWS
from .._model import PlannedModel, Sizes, gathered_parameters

_ROWS, _INNER_ROWS, _TOKENS = 5, 3, 3
"""Arrays of [rows, D], of [rows, F] and of [tokens, D] that exist at a time: rows and what returns
to them; gates, what these are multiplied with, and what returns to both; tokens, their cotangents,
and what returns to them."""

_NAMES = frozenset(("moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo"))


def work_with_experts(own: float, routed: float, policy: str) -> float:
    """Returns the bytes that exist at a time while the backward of a layer runs.

    Args:
        own: Of what a device computes of its own tokens.
        routed: What `routed_bytes` returns.
        policy: A policy of rematerialization.

    Returns:
        The larger of both where attention is not computed again before the experts, else the sum.
    """
    if routed and policy != "none" and "out_proj" in saved_names(policy)[0]:
        return max(own, routed)
    return own + routed


def routed_bytes(
    model: PlannedModel, sizes: Sizes, policy: str, tokens: float, itemsize: int
) -> float:
    """Returns the bytes that exist at a time while the backward of a layer's experts runs.

    Args:
        model: The model.
        sizes: The size of every mesh axis.
        policy: A policy of rematerialization.
        tokens: t.
        itemsize: Bytes of an element.

    Returns:
        The bytes, gradients of the experts included; 0 if the model has no experts.
    """
    if model.routed is None:
        return 0.0
    gathered = tokens * sizes["expert"]
    chunks = expert_chunks(model, sizes, policy, tokens)
    rows = gathered * model.routed.chosen / chunks
    inner = _INNER_ROWS * model.routed.width / sizes["tensor"]
    arrays = rows * (_ROWS * model.hidden + inner) + _TOKENS * gathered * model.hidden
    # Chunks add gradients to sums, beside one that is computed: of three weights of equal sizes.
    gradients = gathered_parameters(model.experts, sizes) * (4 / 3 if chunks > 1 else 1.0)
    return itemsize * arrays + model.of_layers.read * gradients


def gathered_token_bytes(model: PlannedModel, sizes: Sizes, tokens: float, itemsize: int) -> float:
    """Returns the bytes of the tokens that the experts of a device gather.

    Args:
        model: The model.
        sizes: The size of every mesh axis.
        tokens: t.
        itemsize: Bytes of an element.

    Returns:
        The bytes; 0 if the model has no experts.
    """
    return 0.0 if model.routed is None else itemsize * tokens * sizes["expert"] * model.hidden


def expert_chunks(model: PlannedModel, sizes: Sizes, policy: str, tokens: float) -> int:
    """Returns the chunks in which the experts of a layer run the tokens that devices gather.

    Args:
        model: The model.
        sizes: The size of every mesh axis.
        policy: A policy of rematerialization.
        tokens: t.

    Returns:
        The number of chunks; 1 if the model has no experts, or keeps what they compute.
    """
    if model.routed is None:
        return 1
    if policy == "none" or not _NAMES.isdisjoint(saved_names(policy)[0]):
        return 1
    gathered, (num, chosen, _) = int(tokens * sizes["expert"]), model.routed
    return num_chunks(gathered, gathered * chosen // (num * CHUNK_ROWS))
