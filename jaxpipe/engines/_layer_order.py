"""The order in which a stage runs layers of several kinds, such as LLGLLG.

Every kind has its own stack of layers. In one program all stages run the same sequence of kinds:
one of which the layers of every stage are a part, and a stage skips the slots that it has no layer
for. Stages of one pattern skip none. Programs of ranks run the layers of their stages alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from itertools import groupby, islice, permutations

import jax
from jaxtyping import PyTree

Runs = tuple[tuple[str, int, int], ...]
"""Consecutive layers of one kind: the kind, and its first and last slot among those of the kind."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OrderedKeys:
    """The keys of a stage by kind, in a program of its own, and the order of its layers."""

    by_kind: dict[str, PyTree]
    runs: Runs = field(metadata={"static": True})


def layer_runs(sequence: Sequence[str]) -> Runs:
    """Returns the runs of a stage whose layers are of these kinds.

    Example:
        >>> layer_runs("LLGL")
        (('L', 0, 2), ('G', 0, 1), ('L', 2, 3))
    """
    done: dict[str, int] = {}
    runs = []
    for kind, group in groupby(sequence):
        first = done.get(kind, 0)
        done[kind] = first + len(list(group))
        runs.append((kind, first, done[kind]))
    return tuple(runs)


def common_sequence(patterns: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Returns a short sequence of kinds of which every pattern is a part, in order.

    It is shortest for two different patterns. More are joined pair by pair, in several orders.

    Args:
        patterns: The kinds of the layers of every stage, in forward order.

    Returns:
        The kinds of the slots of a stage.

    Example:
        >>> "".join(common_sequence(["LL", "GL", "LG", "LL"]))
        'LGL'
    """
    return _common_sequence(tuple(sorted({tuple(pattern) for pattern in patterns})))


@lru_cache
def _common_sequence(patterns: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    several = islice(permutations(patterns), _MAX_ORDERS)
    return min((reduce(_shortest_common, order) for order in several), key=len)


_MAX_ORDERS = 120
"""All orders of up to five patterns."""


def _shortest_common(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[str, ...]:
    # length[i][j] is that of the shortest sequence of which a[i:] and b[j:] are parts.
    length = [[len(a) - i + len(b) - j for j in range(len(b) + 1)] for i in range(len(a) + 1)]
    for i in reversed(range(len(a))):
        for j in reversed(range(len(b))):
            is_same = a[i] == b[j]
            length[i][j] = 1 + (
                length[i + 1][j + 1] if is_same else min(length[i + 1][j], length[i][j + 1])
            )
    i = j = 0
    sequence: list[str] = []
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            sequence, i, j = [*sequence, a[i]], i + 1, j + 1
        elif length[i + 1][j] <= length[i][j + 1]:
            sequence, i = [*sequence, a[i]], i + 1
        else:
            sequence, j = [*sequence, b[j]], j + 1
    return (*sequence, *a[i:], *b[j:])


def slots_by_kind(sequence: Sequence[str], pattern: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Returns the slots of a stage's layers among those of their kind in the common sequence.

    Example:
        >>> slots_by_kind("LLGL", "LGL")
        {'L': (0, 2), 'G': (0,)}
    """
    slots: dict[str, list[int]] = {kind: [] for kind in sequence}
    passed, layers = dict.fromkeys(sequence, 0), iter(pattern)
    next_kind = next(layers, None)
    for kind in sequence:
        if kind == next_kind:
            slots[kind].append(passed[kind])
            next_kind = next(layers, None)
        passed[kind] += 1
    return {kind: tuple(of_kind) for kind, of_kind in slots.items()}
