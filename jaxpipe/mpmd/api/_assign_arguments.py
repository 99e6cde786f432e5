"""Puts the arguments of a call on the groups that read them."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from ._array import MpmdArray

Target = tuple[int, int, NamedSharding]
"""A rank that reads an argument, the slot of its array in the list, and its sharding there."""


def assign_arguments(
    leaves: Sequence[Any], targets: Sequence[Sequence[Target]], slots: list[Any]
) -> None:
    """Stores every argument in its slots. Moves an array only if its sharding is another one."""
    moving: list[tuple[Any, int, NamedSharding]] = []
    for leaf, of_leaf in zip(leaves, targets, strict=True):
        if isinstance(leaf, MpmdArray):
            _assign_mpmd_array(leaf, of_leaf, slots, moving)
            continue
        for _, slot, sharding in of_leaf:
            if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
                slots[slot] = leaf
            else:
                moving.append((leaf, slot, sharding))
    if moving:
        moved = jax.device_put([x for x, _, _ in moving], [sharding for _, _, sharding in moving])
        for (_, slot, _), array in zip(moving, moved, strict=True):
            slots[slot] = array


def _assign_mpmd_array(
    array: MpmdArray,
    targets: Sequence[Target],
    slots: list[Any],
    moving: list[tuple[Any, int, NamedSharding]],
) -> None:
    array.check_not_deleted()
    for rank, slot, sharding in targets:
        local_array = array.on_rank(rank)
        if local_array is not None and (
            local_array.sharding is sharding or local_array.sharding == sharding
        ):
            slots[slot] = local_array
        else:
            moving.append(
                (array.first_local_array() if local_array is None else local_array, slot, sharding)
            )
