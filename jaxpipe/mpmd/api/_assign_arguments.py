"""Arguments onto the groups that need them."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from ._array import MpmdArray

Target = tuple[int, int, NamedSharding]
"""A rank, where its array belongs in the list, and how it is divided."""


def placed(leaves: Sequence[Any], targets: Sequence[Sequence[Target]], slots: list[Any]) -> None:
    """Puts every argument where it is needed. What is there already is not touched."""
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
