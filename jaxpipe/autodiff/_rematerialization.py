"""Rematerialisation by name: what of a stage or of a layer is kept for its backward, and where.

A model names tensors with `jax.ad_checkpoint.checkpoint_name`. A policy gives each name a place:
kept on the `device`, kept in the host's memory (`offload`), or computed again (`remat`), as
everything without a name is. Names of policies and tensors are MaxText's.

b sequences, T tokens, D embed, H heads, C channels of a head, F width of an MLP.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal, get_args

import jax

Remat = Callable[[Callable], Callable]
"""What wraps a stage or a layer: `jax.checkpoint` with a policy, or the identity."""

Place = Literal["remat", "device", "offload"]

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
"""Every name that models of this package give, and what it stands for."""

_QKV = ("query_proj", "key_proj", "value_proj")
_OF_ATTENTION = (*_QKV, "out_proj", "mla_q", "mla_kv")
_OUT_OF_MLP = ("mlpwo", "moe_mlpwo")
_PROJECTIONS = (*_OF_ATTENTION, "mlpwi_0", "mlpwi_1", "moe_mlpwi_0", "moe_mlpwi_1", *_OUT_OF_MLP)

SAVED: dict[str, tuple[str, ...]] = {
    "minimal_with_context": (*_PROJECTIONS, "context"),
    "minimal": _PROJECTIONS,
    "save_dot_with_context_except_mlp": (*_OF_ATTENTION, "context"),
    "save_dot_except_mlpwi": (*_OF_ATTENTION, *_OUT_OF_MLP),
    "save_dot_except_mlp": _OF_ATTENTION,
    "save_qkv_proj": _QKV,
    "save_out_proj": ("out_proj",),
}
"""What a policy keeps on the device, beside the input. From fast and large to slow and small."""

OFFLOADED: dict[str, tuple[str, ...]] = {
    "minimal_offloaded": _PROJECTIONS,
    "qkv_proj_offloaded": _QKV,
}
"""What a policy keeps in the host's memory."""

POLICIES = ("full", "none", *SAVED, *OFFLOADED, "custom")
"""`full` keeps the input alone, `none` computes nothing again, `custom` asks for every tensor."""

# Inside a scan nothing can be shared between forward and backward but what the scan saves.
recompute: Remat = partial(jax.checkpoint, prevent_cse=False)
"""Keeps the input of a tick and computes the rest again in the backward."""


def keep(work: Callable) -> Callable:
    """Keeps everything that the backward needs: no rematerialisation."""
    return work


def remat_by_name(policy: str, places: Mapping[str, str] | None = None) -> Remat:
    """What wraps a stage or a layer so that its backward finds what `policy` keeps.

    Args:
        policy: One of `POLICIES`.
        places: For `custom`: the place of each tensor of `TENSORS`. One that is left out is
            computed again.

    Raises:
        ValueError: If there is no such policy, tensor or place.
    """
    if policy == "full":
        return recompute
    if policy == "none":
        return keep
    saved, offloaded = kept_names(policy, places)
    choose = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=saved,
        names_which_can_be_offloaded=offloaded,
        offload_src="device",
        offload_dst=HOST,
    )
    return partial(jax.checkpoint, prevent_cse=False, policy=choose)


HOST = "pinned_host"
"""The memory that offloaded tensors lie in."""


def kept_names(
    policy: str, places: Mapping[str, str] | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tensors that a policy keeps on the device, and those that it offloads."""
    if policy not in POLICIES:
        raise ValueError(f"`remat_policy` is {policy!r}. Give one of {', '.join(POLICIES)}.")
    if policy != "custom":
        return SAVED.get(policy, ()), OFFLOADED.get(policy, ())
    places = places or {}
    for name, place in places.items():
        if name not in TENSORS:
            raise ValueError(f"No tensor is called {name!r}. Give places for {', '.join(TENSORS)}.")
        if place not in get_args(Place):
            raise ValueError(f"`{name}` is {place!r}. Give 'remat', 'device' or 'offload'.")
    saved, offloaded = (
        tuple(name for name, place in places.items() if place == wanted)
        for wanted in ("device", "offload")
    )
    return saved, offloaded


def check_offload(policy: str, places: Mapping[str, str] | None, devices: Iterable[Any]) -> None:
    """Checks that `devices` have the memory that `policy` offloads to.

    Emulated devices on CPUs do. There the program is the same and moves nothing, as XLA drops what
    it says about memories: the host's is all there is.

    Raises:
        ValueError: If they have not.
    """
    _, offloaded = kept_names(policy, places)
    device = next(iter(devices))
    kinds = [memory.kind for memory in device.addressable_memories()]
    if offloaded and HOST not in kinds:
        raise ValueError(
            f"`remat_policy` is {policy!r}, which offloads {', '.join(offloaded)} to {HOST!r}, but "
            f"{device.platform} devices have the memories {', '.join(kinds)} alone. Give a policy "
            "that keeps tensors on the device."
        )
