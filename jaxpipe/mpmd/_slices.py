"""A stage that runs one slice of the sequences of a microbatch, for programs of every rank.

A slice is given what each slice before it has appended to the state, as arrays of their own. They
are results of the forwards of these slices, so no buffer is copied; and a slice attends to as many
positions as it can see.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from ..autodiff import StagedModel
from ..autodiff.staged_model import Past
from ..schedules import Schedule
from ..schedules.language import num_slices


def is_sliced(schedule: Any) -> bool:
    """Returns whether a schedule cuts sequences into slices."""
    return isinstance(schedule, Schedule) and num_slices(schedule) > 1


def stage_of_slices(model: StagedModel, num_slices: int, dims: Sequence[int]) -> Callable:
    """Returns the stage as a function of what the slices before have appended to the state.

    It is `(weights, x, inputs, (keys, a tree for each slice before)) -> (y, aux, tree)`. The last
    slice appends nothing, as no slice would read it.
    """

    def run(
        weights: Any, x: Any, inputs: Any, keys_and_past: tuple[Any, list[Any]]
    ) -> tuple[Any, ...]:
        keys, earlier = keys_and_past
        assert model.sliced_stage is not None, "checked by `past_of_slices`"
        y, aux, past = model.sliced_stage(weights, x, inputs, keys, _past_of(earlier, dims))
        is_last = len(earlier) == num_slices - 1
        return y, aux, () if is_last else past.new

    return run


def _past_of(earlier: list[PyTree], dims: Sequence[int]) -> Past:
    """Returns the state for the last of `len(earlier) + 1` slices."""
    if not earlier:
        return Past()
    structure = jax.tree.structure(earlier[0])
    parts = list(zip(*map(jax.tree.leaves, earlier), strict=True))
    leaves = [
        lax.concatenate([*of_leaf, jnp.zeros_like(of_leaf[0])], dim)
        for of_leaf, dim in zip(parts, dims, strict=True)
    ]
    offset = len(earlier) * parts[0][0].shape[dims[0]]
    return Past(structure.unflatten(leaves), offset=offset, num_slices=len(earlier) + 1)
