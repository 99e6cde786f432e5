"""Orders the rows of several sources: a function of the index of a row in the whole run."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import gcd, lcm

import grain
import numpy as np

LONGEST_PERIOD = 100_000

RowOrder = Callable[[int], tuple[int, int]]
"""From the index of a row in the run to its source and its index there."""


def row_order(
    sizes: Sequence[int], *, weights: Sequence[float], shuffle_seed: int | None
) -> RowOrder:
    """Returns the order of the rows of sources of some `sizes`, epoch after epoch, in exact shares.

    A source has another order in each of its epochs, and begins its next one when it has ended,
    whatever the others do.
    """
    epochs = []
    for k, size in enumerate(sizes):
        row_ids, seed = grain.MapDataset.range(size), _source_seed(shuffle_seed, k)
        epochs.append((row_ids if seed is None else row_ids.shuffle(seed=seed)).repeat())
    turns = source_turns(weights)
    source, before = turns.T
    counts = np.bincount(source)

    def locate_row(n: int) -> tuple[int, int]:
        cycle, turn = divmod(n, len(turns))
        k = int(source[turn])
        row = epochs[k][cycle * int(counts[k]) + int(before[turn])]
        assert row is not None, "nothing filters rows"
        return k, int(row)

    return locate_row


# Not grain's MapDataset.mix, which rounds weights: of 7 to 3 it makes 233 to 100.
def source_turns(weights: Sequence[float]) -> np.ndarray:
    """Gives each of P turns, which repeat, to the source that is furthest behind its share.

    The result [P, 2] has the source of each turn, and the number of its turns before.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    integers = [int(weight * lcm(*(w.denominator for w in exact))) for weight in exact]
    shares = np.asarray([weight // gcd(*integers) for weight in integers], object)
    length = int(sum(shares))
    if length > LONGEST_PERIOD:
        raise ValueError(
            f"The weights of sources are {', '.join(f'{weight:g}' for weight in weights)}, which "
            f"repeat after {length} rows. Round them, so that it is at most {LONGEST_PERIOD}."
        )
    shares = shares.astype(np.int64)
    num_turns = np.zeros_like(shares)
    turns = np.empty((length, 2), np.int64)
    for n in range(length):
        k = int(np.argmax((n + 1) * shares - num_turns * length))
        turns[n] = k, num_turns[k]
        num_turns[k] += 1
    return turns


def _source_seed(seed: int | None, source: int) -> int | None:
    """Returns the seed of a source. Grain adds the epoch: adjacent seeds would repeat orders."""
    if seed is None or source == 0:
        return seed
    return int(np.random.SeedSequence((seed, source)).generate_state(1)[0])
