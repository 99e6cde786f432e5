"""Puts the arguments of a call on the groups that read them."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from ._array import MpmdArray

Target = tuple[int, int, NamedSharding]
"""A rank that reads an argument, the slot of its array in the list, and its sharding there."""


def placed(leaves: Sequence[Any], targets: Sequence[Sequence[Target]], slots: list[Any]) -> None:
    """Stores every argument in its slots. Moves an array only if its sharding is another one."""
    moving: list[tuple[Any, int, NamedSharding]] = []
    for leaf, of_leaf in zip(leaves, targets, strict=True):
        if isinstance(leaf, MpmdArray):
            _from_groups(leaf, of_leaf, slots, moving)
            continue
        for _, place, sharding in of_leaf:
            if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
                slots[place] = leaf
            else:
                moving.append((leaf, place, sharding))
    if moving:
        moved = jax.device_put([x for x, _, _ in moving], [sharding for _, _, sharding in moving])
        for (_, place, _), array in zip(moving, moved, strict=True):
            slots[place] = array


def _from_groups(
    array: MpmdArray,
    targets: Sequence[Target],
    slots: list[Any],
    moving: list[tuple[Any, int, NamedSharding]],
) -> None:
    array.check_not_deleted()
    for rank, place, sharding in targets:
        there = array.on_rank(rank)
        if there is not None and (there.sharding is sharding or there.sharding == sharding):
            slots[place] = there
        else:
            moving.append((array.first_local_array() if there is None else there, place, sharding))
