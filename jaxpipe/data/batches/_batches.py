"""Batches by step: a pure function from a step's number to its rows, so there is no state to save.

So is the order of the rows of several sources, of the index of a row in the whole run.

B rows a batch, T tokens a row.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from typing import Any, Protocol, runtime_checkable

import grain
import numpy as np

from ._corpus import Corpus, CorpusRows, Row, corpus_fingerprint, empty_row

Batch = dict[str, np.ndarray]
"""The arrays of `Row`, [B, T]."""


@runtime_checkable
class RowsByStep(Protocol):
    """Batches whose rows can be made one by one."""

    @property
    def rows(self) -> Callable[[int, Sequence[int]], Batch]:
        """Returns `rows(step, row_ids)`: n rows of a step, [n, T], by their ids, 0 to B - 1."""
        ...

    @property
    def num_targets(self) -> Callable[[int], int]:
        """Returns `num_targets(step)`: the sum of `target_weights` over the rows of a step."""
        ...


@dataclass(frozen=True)
class Batches:
    """An endless sequence of batches, a `RowsByStep`. A call returns the batch of a step."""

    batch_size: int  # B, the rows of a batch
    rows: Callable[[int, Sequence[int]], Batch]
    num_targets: Callable[[int], int]
    decided_by: dict[str, Any]  # settings and files that determine the rows, by name, for JSON

    def __call__(self, step: int) -> Batch:
        return self.rows(step, range(self.batch_size))


def synthetic_batches(
    *, vocab_size: int, batch_size: int, length: int, seed: int, stream: int = 0
) -> Batches:
    """Returns batches of random tokens, determined by `(seed, step, stream)` alone.

    Every row is one document of full length.

    Args:
        vocab_size: Ids are drawn from 0 to `vocab_size - 1`.
        batch_size: B, the number of rows of a batch.
        length: T, the number of tokens of a row.
        seed: The seed of the tokens.
        stream: Distinguishes independent streams of one seed, such as training and evaluation.

    Returns:
        The batches.

    Example:
        >>> batches = synthetic_batches(vocab_size=256, batch_size=4, length=8, seed=0)
        >>> batches(0)["tokens"].shape
        (4, 8)
    """

    def rows(step: int, row_ids: Sequence[int]) -> Batch:
        random = np.random.default_rng((seed, step, stream))
        tokens = random.integers(vocab_size, size=(batch_size, length + 1), dtype=np.int32)
        tokens = tokens[np.asarray(row_ids)]
        shape = (len(row_ids), length)
        return {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "target_weights": np.ones(shape, np.float32),
            "positions": np.broadcast_to(np.arange(length, dtype=np.int32), shape),
            "segment_ids": np.ones(shape, np.int32),
        }

    decided_by = {"vocabulary": vocab_size, "rows": batch_size, "length": length, "seed": seed}
    return Batches(batch_size, rows, lambda step: batch_size * length, decided_by)


def corpus_batches(
    corpora: Sequence[Corpus],
    *,
    batch_size: int,
    length: int,
    packing: bool,
    shuffle_seed: int | None,
    weights: Sequence[float] | None = None,
) -> Batches:
    """Returns batches of the rows of one or several corpora, epoch after epoch.

    Each corpus is cut into rows by itself, and these are then shuffled, with another order in each
    epoch. A batch may reach from one epoch into the next, and may be larger than a corpus.

    Args:
        corpora: From `tokenize` or `read_corpus`.
        batch_size: B, the rows of a batch.
        length: T, the tokens of a row.
        packing: Whether a row may hold several documents.
        shuffle_seed: 0 to 2**32 - 1, or None to keep the order of each corpus in every epoch.
        weights: The relative share of the rows of each corpus. Default: equal shares.

    Returns:
        The batches.

    Raises:
        ValueError: If the shares repeat only after more than 100,000 rows.

    Example:
        >>> from jaxpipe.data.batches import tokenize
        >>> from jaxpipe.data.sources import ByteTokenizer
        >>> corpus = tokenize(["first text", "second text"], ByteTokenizer())
        >>> options = {"length": 8, "packing": True, "shuffle_seed": None}
        >>> batches = corpus_batches([corpus], batch_size=2, **options)
        >>> bytes(batches(0)["tokens"][0].tolist())
        b'first te'
    """
    sources = [CorpusRows(corpus, length, packing) for corpus in corpora]
    weights = weights or [1.0] * len(corpora)
    order = row_order(list(map(len, sources)), weights=weights, shuffle_seed=shuffle_seed)

    def chosen(step: int, row_ids: Iterable[int]) -> Iterator[tuple[CorpusRows, int]]:
        for row_id in row_ids:
            source, row = order(step * batch_size + row_id)
            yield sources[source], row

    return Batches(
        batch_size,
        lambda step, row_ids: stack_rows([rows[i] for rows, i in chosen(step, row_ids)]),
        lambda step: sum(rows.num_targets(i) for rows, i in chosen(step, range(batch_size))),
        {
            "rows": batch_size,
            "length": length,
            "packing": packing,
            "seed": shuffle_seed,
            "weights": list(weights),
            "sources": [corpus_fingerprint(corpus) for corpus in corpora],
        },
    )


class FiniteBatches(Sequence[Batch]):
    """A finite sequence of batches, a `RowsByStep`. Each batch is made when it is indexed."""

    batch_size: int

    def __getitem__(self, index: int) -> Batch:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= index < len(self):
            raise IndexError(f"There are {len(self)} batches, and no batch {index}.")
        return self.rows(index, range(self.batch_size))

    @abstractmethod
    def rows(self, index: int, row_ids: Sequence[int]) -> Batch:
        """Returns some rows of a batch, [n, T], by their ids."""

    @abstractmethod
    def num_targets(self, index: int) -> int:
        """Returns the sum of `target_weights` over a batch."""


@dataclass(frozen=True)
class FirstBatches(FiniteBatches):
    """The first `count` batches of an endless sequence.

    Example:
        >>> endless = synthetic_batches(vocab_size=256, batch_size=4, length=8, seed=0)
        >>> len(FirstBatches(endless, 3))
        3
    """

    batches: Batches
    count: int

    @property
    def batch_size(self) -> int:
        return self.batches.batch_size

    def __len__(self) -> int:
        return self.count

    def rows(self, index: int, row_ids: Sequence[int]) -> Batch:
        return self.batches.rows(index, row_ids)

    def num_targets(self, index: int) -> int:
        return self.batches.num_targets(index)


@dataclass(frozen=True)
class SinglePassBatches(FiniteBatches):
    """Every row of some corpora once, in order, and rows of padding in the last batch."""

    sources: tuple[CorpusRows, ...]
    batch_size: int

    def __len__(self) -> int:
        return -(-sum(map(len, self.sources)) // self.batch_size)

    def rows(self, index: int, row_ids: Sequence[int]) -> Batch:
        origins = [self._origin(index * self.batch_size + row_id) for row_id in row_ids]
        empty = empty_row(self.sources[0].length)
        return stack_rows([rows[i] if rows is not None else empty for rows, i in origins])

    def num_targets(self, index: int) -> int:
        first = index * self.batch_size
        origins = [self._origin(first + row_id) for row_id in range(self.batch_size)]
        return sum(rows.num_targets(i) for rows, i in origins if rows is not None)

    def _origin(self, row_id: int) -> tuple[CorpusRows | None, int]:
        """Returns the source of a row and its index there; no source after the last row."""
        for rows in self.sources:
            if row_id < len(rows):
                return rows, row_id
            row_id -= len(rows)
        return None, row_id


def stack_rows(rows: Sequence[Row]) -> Batch:
    """Stacks rows to a batch."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


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
