"""Puts the arguments of a call on the groups that read them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from ._array import MpmdArray


class ArgumentSlot(NamedTuple):
    """The index of an argument in the arrays of a rank, and the sharding of its array."""

    rank: int
    slot: int
    sharding: NamedSharding


class _Move(NamedTuple):
    """An array that has another sharding than its slot asks for."""

    array: Any
    slot: int
    sharding: NamedSharding


def assign_arguments(
    leaves: Sequence[Any], targets: Sequence[Sequence[ArgumentSlot]], slots: list[Any]
) -> None:
    """Stores every argument in its slots. Moves an array only if its sharding is another one."""
    moving: list[_Move] = []
    for leaf, of_leaf in zip(leaves, targets, strict=True):
        if isinstance(leaf, MpmdArray):
            _assign_mpmd_array(leaf, of_leaf, slots, moving)
            continue
        for _, slot, sharding in of_leaf:
            if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
                slots[slot] = leaf
            else:
                moving.append(_Move(leaf, slot, sharding))
    if moving:
        moved = jax.device_put([m.array for m in moving], [m.sharding for m in moving])
        for move, array in zip(moving, moved, strict=True):
            slots[move.slot] = array


def _assign_mpmd_array(
    array: MpmdArray, targets: Sequence[ArgumentSlot], slots: list[Any], moving: list[_Move]
) -> None:
    array.check_not_deleted()
    for rank, slot, sharding in targets:
        local_array = array.on_rank(rank)
        if local_array is not None and (
            local_array.sharding is sharding or local_array.sharding == sharding
        ):
            slots[slot] = local_array
        else:
            local_array = array.first_local_array() if local_array is None else local_array
            moving.append(_Move(local_array, slot, sharding))
