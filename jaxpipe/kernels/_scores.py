"""Which keys a query sees, and how scores become weights: what every kernel is given."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

Segments = tuple[Int[Array, "b t"], Int[Array, "b u"]]
"""The documents of queries and of keys. A query sees keys of its own document alone."""


@dataclass(frozen=True)
class Visible:
    """Which keys a query sees, by how far a key lies before it: `least <= q - k <= most`.

    Called with indices of queries and keys it returns whether they see each other. It is equal to
    others by value, so that a kernel which is given it is compiled once.
    """

    least: int | None = 0
    most: int | None = None

    def __call__(self, queries: Array, keys: Array) -> Array:
        seen = [queries - keys >= self.least] if self.least is not None else []
        seen += [queries - keys <= self.most] if self.most is not None else []
        everything = jnp.broadcast_to(True, jnp.broadcast_shapes(queries.shape, keys.shape))
        return seen[0] & seen[1] if len(seen) == 2 else seen[0] if seen else everything

    def of_blocks(
        self, queries: Int[np.ndarray, " Q"], block_q: int, keys: Int[np.ndarray, " K"], block: int
    ) -> Int[np.ndarray, "Q K"]:
        """Returns 0, 1 or 2 for every block: it is seen nowhere, in part, or everywhere.

        Args:
            queries: The index of the first of `block_q` queries of each block.
            keys: The index of the first of `block` keys of each block.

        Returns:
            [Q, K] of these numbers, by blocks of queries and blocks of keys.
        """
        nearest = queries[:, None] - (keys[None, :] + block - 1)
        farthest = queries[:, None] + block_q - 1 - keys[None, :]
        some, every = np.ones_like(nearest, bool), np.ones_like(nearest, bool)
        if self.least is not None:
            some, every = some & (farthest >= self.least), every & (nearest >= self.least)
        if self.most is not None:
            some, every = some & (nearest <= self.most), every & (farthest <= self.most)
        return some.astype(np.int32) + every


@dataclass(frozen=True)
class Scores:
    """How scores are computed, and which of them count.

    Attributes:
        causal: Whether a query sees no later keys.
        window: The number of tokens that a query sees back to, itself included; without `causal` as
            many ahead. None: all.
        soft_cap: Scores s become `soft_cap * tanh(s / soft_cap)` (Gemma 2, arXiv 2408.00118). None:
            they stay.
        scale: The factor of the products of queries and keys. None: 1 / sqrt(C).
    """

    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None

    @property
    def visible(self) -> Visible:
        """Returns which keys a query sees in one document."""
        most = None if self.window is None else self.window - 1
        return Visible(0 if self.causal else None if most is None else -most, most)

    def scale_of(self, q: Array) -> float:
        """Returns the factor of the products of queries [..., C] and keys."""
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale


CAUSAL = Scores()


class Placement(NamedTuple):
    """Where the queries of a device lie among the keys that it has.

    Attributes:
        starts: [n, R] the index among the keys of the first query of every run, on each of n
            devices.
        run: The number of queries of a run.
        num_keys: The number of keys.
        device: Which of the n devices this is.
    """

    starts: np.ndarray
    run: int
    num_keys: int
    device: jax.Array | int = 0

    def indices(self) -> Int[Array, " t"]:
        """Returns the index among the keys of every query of this device."""
        starts = jnp.asarray(self.starts, jnp.int32)[self.device]
        return (starts[:, None] + jnp.arange(self.run, dtype=jnp.int32)).reshape(-1)

    def most_pairs(self, visible: Visible) -> int:
        """Returns the pairs of a query and a key that see each other, on the busiest device."""
        queries = self.starts[:, :, None] + np.arange(self.run)  # [n, R, run]
        first, last = np.zeros_like(queries), np.full_like(queries, self.num_keys - 1)
        if visible.most is not None:
            first = np.maximum(first, queries - visible.most)
        if visible.least is not None:
            last = np.minimum(last, queries - visible.least)
        return int(np.maximum(last - first + 1, 0).sum(axis=(1, 2)).max())

    def parts(self, length: int) -> list["Placement"]:
        """Returns the placements of parts of `length` queries, which the runs are cut into."""
        starts = self.starts[:, :, None] + np.arange(0, self.run, length)  # [n, R, parts of a run]
        columns = starts.reshape(len(starts), -1, 1).swapaxes(0, 1)
        return [self._replace(starts=column, run=length) for column in columns]

    def keys_seen(self, visible: Visible) -> Int[np.ndarray, "2 n"]:
        """Returns the first key that a query of each device sees, and the one behind the last."""
        first, last = self.starts.min(axis=1), self.starts.max(axis=1) + self.run
        first = np.zeros_like(first) if visible.most is None else first - visible.most
        last = np.full_like(last, self.num_keys) if visible.least is None else last - visible.least
        return np.clip(np.stack([first, last]), 0, self.num_keys)

    @property
    def is_whole(self) -> bool:
        """True if queries and keys are the same tokens."""
        return self.starts.shape == (1, 1) and self.run == self.num_keys


def same_tokens(length: int) -> Placement:
    """Returns the placement where queries and keys are the same tokens."""
    return Placement(np.zeros((1, 1), np.int32), length, length)


def dense_mask(
    scores: Scores, segments: Segments | None, where: Placement
) -> Bool[Array, "b 1 t u"]:
    """Returns whether each query sees each key; b is 1 without segments."""
    queries, keys = where.indices()[:, None], jnp.arange(where.num_keys, dtype=jnp.int32)[None]
    mask = scores.visible(queries, keys)[None]
    if segments is not None:
        mask = mask & (segments[0][:, :, None] == segments[1][:, None, :])
    return mask[:, None]
