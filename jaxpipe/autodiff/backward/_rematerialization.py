"""Rematerialization by name: which tensors are saved for the backward, and in which memory.

A model names tensors with `jax.ad_checkpoint.checkpoint_name`. A policy assigns a location to
each name: saved on the `device`, saved in host memory (`offload`), or recomputed (`remat`). A
tensor without a name is always recomputed. Names of policies and tensors are those of MaxText.

b sequences, T tokens, D embed, H heads, C channels of a head, F width of an MLP.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal, get_args

import jax

Remat = Callable[[Callable], Callable]
"""A wrapper of a stage or a layer: `jax.checkpoint` with a policy, or the identity."""

Location = Literal["remat", "device", "offload"]
"""Whether a tensor is recomputed, saved on the device, or saved in host memory."""

TENSORS: dict[str, str] = {
    "decoder_layer_input": "what enters a layer [b, T, D]",
    "query_proj": "queries as attention takes them, their position in them [b, T, H, C]",
    "key_proj": "keys, likewise",
    "value_proj": "values",
    "context": "what attention returns, before the output projection",
    "out_proj": "the output projection of attention [b, T, D]",
    "mlpwi_0": "the gate of an MLP, or of the experts for every token [b, T, F]",
    "mlpwi_1": "what the gate is multiplied with [b, T, F]",
    "mlpwo": "what such an MLP adds [b, T, D]",
    "mla_q": "compressed queries of latent attention, normalized",
    "mla_kv": "compressed keys and values, normalized",
    "moe_mlpwi_0": "the gates of routed experts [rows of all experts, F]",
    "moe_mlpwi_1": "what these are multiplied with",
    "moe_mlpwo": "what routed experts return, before shares are applied [rows of all experts, D]",
}
"""Every tensor name that the models of this package use, with its meaning."""

_QKV = ("query_proj", "key_proj", "value_proj")
_ATTENTION = (*_QKV, "out_proj", "mla_q", "mla_kv")
_MLP_OUTPUTS = ("mlpwo", "moe_mlpwo")
_PROJECTIONS = (*_ATTENTION, "mlpwi_0", "mlpwi_1", "moe_mlpwi_0", "moe_mlpwi_1", *_MLP_OUTPUTS)

SAVED: dict[str, tuple[str, ...]] = {
    "minimal_with_context": (*_PROJECTIONS, "context"),
    "minimal": _PROJECTIONS,
    "save_dot_with_context_except_mlp": (*_ATTENTION, "context"),
    "save_dot_except_mlpwi": (*_ATTENTION, *_MLP_OUTPUTS),
    "save_dot_except_mlp": _ATTENTION,
    "save_qkv_proj": _QKV,
    "save_out_proj": ("out_proj",),
}
"""Tensors that a policy keeps on the device, in addition to the input of a layer. The order is
from fast with much memory to slow with little memory."""

OFFLOADED: dict[str, tuple[str, ...]] = {
    "minimal_offloaded": _PROJECTIONS,
    "qkv_proj_offloaded": _QKV,
}
"""Tensors that a policy keeps in host memory."""

POLICIES = ("full", "none", *SAVED, *OFFLOADED, "custom")
"""`full` keeps the input and the tensors named `SUM_OVER_DEVICES` or `SUM_OVER_CHANNELS`, `none`
recomputes nothing, `custom` takes a place for each tensor."""

SUM_OVER_DEVICES = "sum_over_devices"
"""The name of a few numbers that devices have summed up. Every policy with a name saves them: to
sum them again a backward would wait for what its devices are sending, such as gathered weights."""

SUM_OVER_CHANNELS = "sum_over_channels"
"""The name of one number for each token, such as the mean square of the input of a layer. Every
policy with a name saves it: to sum it again a backward would read all of that input once more."""

_SAVED_SUMS = (SUM_OVER_DEVICES, SUM_OVER_CHANNELS)

# Inside a scan XLA cannot merge forward and recomputation, so no barrier is needed.
recompute: Remat = partial(
    jax.checkpoint,
    prevent_cse=False,
    policy=jax.checkpoint_policies.save_only_these_names(*_SAVED_SUMS),
)
"""Keeps the input of a tick and the same two sums; the backward computes the rest again."""


def apart(remat: Remat) -> Remat:
    """Returns a wrapper for work whose backward is in the same computation as its forward.

    There XLA merges what is computed again with what was computed, unless a barrier is between
    (https://docs.jax.dev/en/latest/_autosummary/jax.checkpoint.html). A wrapper of the user's own
    is theirs.
    """
    if isinstance(remat, partial) and remat.func is jax.checkpoint:
        return partial(remat, prevent_cse=True)
    return remat


def keep(work: Callable) -> Callable:
    """Returns `work` unchanged: the backward finds all values it needs, and recomputes none.

    Args:
        work: A stage or a layer.

    Returns:
        `work`.
    """
    return work


def remat_by_name(policy: str, locations: Mapping[str, str] | None = None) -> Remat:
    """Returns a wrapper for a stage or a layer that keeps the tensors of a policy for the backward.

    Args:
        policy: One of `POLICIES`, such as "full", "none", "minimal" or "custom".
        locations: For `custom`: the location of each tensor of `TENSORS`. A tensor that is left out
            is computed again.

    Returns:
        `(function) -> function`: `jax.checkpoint` with the policy, or the identity for `none`.

    Raises:
        ValueError: If the policy, a tensor or a location is unknown.

    Example:
        >>> saved = remat_by_name("custom", {"query_proj": "device"})
        >>> float(jax.grad(saved(jax.numpy.sin))(0.0))
        1.0
    """
    if policy == "full":
        return recompute
    if policy == "none":
        return keep
    saved, offloaded = saved_names(policy, locations)
    choose = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=(*saved, *_SAVED_SUMS),
        names_which_can_be_offloaded=offloaded,
        offload_src="device",
        offload_dst=HOST,
    )
    return partial(jax.checkpoint, prevent_cse=False, policy=choose)


HOST = "pinned_host"
"""Kind of memory in which offloaded tensors are stored."""


def saved_names(
    policy: str, locations: Mapping[str, str] | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the tensors that a policy saves on the device, and those that it offloads."""
    if policy not in POLICIES:
        raise ValueError(f"`remat_policy` is {policy!r}. Give one of {', '.join(POLICIES)}.")
    if policy != "custom":
        return SAVED.get(policy, ()), OFFLOADED.get(policy, ())
    locations = locations or {}
    for name, location in locations.items():
        if name not in TENSORS:
            raise ValueError(
                f"No tensor is called {name!r}. Give locations for {', '.join(TENSORS)}."
            )
        if location not in get_args(Location):
            raise ValueError(f"`{name}` is {location!r}. Give 'remat', 'device' or 'offload'.")
    saved, offloaded = (
        tuple(name for name, location in locations.items() if location == memory)
        for memory in ("device", "offload")
    )
    return saved, offloaded


def check_offload(policy: str, locations: Mapping[str, str] | None, devices: Iterable[Any]) -> None:
    """Checks that devices have the kind of memory to which a policy offloads.

    GPUs that are not there, for which programs are compiled, do not say which memories they have.
    """
    # Emulated devices on CPUs have it. On these the program is the same but moves no data: XLA
    # ignores memory kinds, because host memory is the only memory.
    _, offloaded = saved_names(policy, locations)
    device = next(iter(devices))
    kinds = [memory.kind for memory in device.addressable_memories()]
    if offloaded and kinds and HOST not in kinds:
        raise ValueError(
            f"`remat_policy` is {policy!r}, which offloads {', '.join(offloaded)} to {HOST!r}, but "
            f"{device.platform} devices have the memories {', '.join(kinds)} alone. Give a policy "
            "that keeps tensors on the device."
        )
