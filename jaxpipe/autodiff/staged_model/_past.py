"""State that a layer carries along the slices of a sequence, such as keys and values of attention.

A schedule with slices runs one slice of each sequence at a time. Slice i writes positions i * t to
(i + 1) * t of every leaf [b, T, ...] of the state, and reads those before. So the state is written
once, and its cotangent is complete when the backwards of all later slices have run. b rows, T
positions in slices of t.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Int, PyTree

WHOLE_STATE = "past"
"""The name by which a policy of rematerialization finds the state of all slices."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("earlier", "new", "offset"),
    meta_fields=("num_slices",),
)
@dataclass(frozen=True)
class Past:
    """What the slices before this one have written; a layer is given it, and returns it.

    The default is that of a whole sequence: one slice, with none before it.

    Example:
        >>> past = Past(jnp.zeros((1, 4)), offset=2, num_slices=2)
        >>> keys, past = past.append(jnp.ones((1, 2)))
        >>> keys.tolist(), past.causal_mask(2).tolist()
        ([[0.0, 0.0, 1.0, 1.0]], [[True, True, True, False], [True, True, True, True]])
    """

    # [b, T, ...] leaves with zeros from `offset` on. None: not known, as for a whole sequence.
    earlier: PyTree = None
    new: PyTree = None  # [b, t, ...] leaves that this slice has appended; None before that
    offset: Any = 0  # the position of the first token of this slice
    num_slices: int = 1  # the number of slices of a sequence

    def append(self, new: PyTree) -> "tuple[PyTree, Past]":
        """Adds what this slice contributes."""
        if self.new is not None:
            raise ValueError(
                "`past.append` was called twice in one layer. Call it once, with a tuple or a dict "
                "of all that the layer carries."
            )
        for leaf in jax.tree.leaves(new):
            if jnp.ndim(leaf) < 2:
                raise ValueError(
                    f"`past.append` was given a leaf of shape {jnp.shape(leaf)}. Give leaves "
                    "[b, t, ...], with an entry for each token of the slice."
                )
        if self.num_slices == 1:
            return new, replace(self, new=new)
        if self.earlier is None:  # the first trace, which finds out how large the state is
            full = jax.tree.map(partial(_zeros_of_all_slices, self.num_slices), new)
            return full, replace(self, earlier=full, new=new)

        def write(full: Array, part: Array) -> Array:
            whole = lax.dynamic_update_slice_in_dim(full, part, self.offset, axis=1)
            return checkpoint_name(whole, WHOLE_STATE)

        return jax.tree.map(write, self.earlier, new), replace(self, earlier=None, new=new)

    def split(self, count: int) -> "list[Past]":
        """Returns a `Past` for each part of a layer that appends; `joined` reverses it."""
        if count == 1:
            return [self]
        earlier = (None,) * count if self.earlier is None else self.earlier
        return [replace(self, earlier=part) for part in earlier]

    def joined(self, parts: "Sequence[Past]") -> "Past":
        """Returns the `Past` of a layer from those that its parts returned."""
        if len(parts) == 1:
            return parts[0]
        earlier = tuple(part.earlier for part in parts)
        is_known = any(part is not None for part in earlier)
        new = tuple(part.new for part in parts)
        return replace(self, earlier=earlier if is_known else None, new=new)

    def positions(self, num_tokens: int) -> Int[Array, " t"]:
        """Returns the positions of the tokens of the slice in their sequence."""
        return self.offset + jnp.arange(num_tokens, dtype=jnp.int32)

    def causal_mask(self, num_queries: int, window: int | None = None) -> Bool[Array, "t T"]:
        """Returns whether each token of the slice attends to a position: those up to its own.

        With a window these are so many, its own included.
        """
        keys = jnp.arange(num_queries * self.num_slices, dtype=jnp.int32)
        queries = self.positions(num_queries)[:, None]
        return keys <= queries if window is None else (keys <= queries) & (keys > queries - window)


def _zeros_of_all_slices(num_slices: int, part: Array) -> Array:
    shape = part.shape[0], part.shape[1] * num_slices, *part.shape[2:]
    return jnp.zeros_like(part, shape=shape)
