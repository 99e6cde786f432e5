"""Batches by step: a pure function from a step's number to its rows, so there is no state to save.

B rows a batch, T tokens a row. A row is a window of a stream of documents, padded with zeros:
`segment_ids` count its documents from 1 (0 is padding), `positions` restart with each of them, and
a target is the next token of the same document, with weight 0 where there is none.
"""

from collections.abc import Callable

import grain
import numpy as np
from jaxtyping import Int64

from ._documents import Corpus

Row = dict[str, np.ndarray]
"""[T] tokens, targets, positions, segment_ids (int32) and target_weights (float32, 0 or 1)."""

Batch = dict[str, np.ndarray]
"""The same names, [B, T]."""

BatchAt = Callable[[int], Batch]
"""The batch of a step: always the same one, in any order of steps."""


def global_batch_size(per_device_batch_size: float, num_devices: int) -> int:
    """Rows of one step on all devices; the product must be whole."""
    rows = per_device_batch_size * num_devices
    if rows < 1 or rows != round(rows):
        raise ValueError(
            f"`per_device_batch_size` = {per_device_batch_size:g} on {num_devices} devices makes "
            f"{rows:g} rows. Choose it so that the product is a whole number."
        )
    return round(rows)


def synthetic_batches(*, vocab_size: int, batch_size: int, length: int, seed: int) -> BatchAt:
    """Random tokens, one document of full length a row, from (seed, step) alone."""

    def batch_at(step: int) -> Batch:
        random = np.random.default_rng((seed, step))
        tokens = random.integers(vocab_size, size=(batch_size, length + 1), dtype=np.int32)
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), (batch_size, length))
        return {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "target_weights": np.ones((batch_size, length), np.float32),
            "positions": positions,
            "segment_ids": np.ones((batch_size, length), np.int32),
        }

    return batch_at


def text_batches(
    corpus: Corpus, *, batch_size: int, length: int, packing: bool, shuffle_seed: int | None
) -> BatchAt:
    """Rows of a corpus, epoch after epoch.

    Rows are cut once and then shuffled, with another order in each epoch. A batch may reach from
    one epoch into the next, and may be larger than the corpus.

    Args:
        corpus: From `tokenize`. Kept in memory, 4 bytes a token.
        batch_size: B.
        length: T.
        packing: Rows of several documents (`packed_windows`), or of one (`document_windows`).
        shuffle_seed: 0 to 2**32 - 1, or None for the corpus's own order in every epoch.
    """
    windows = (packed_windows if packing else document_windows)(corpus, length)
    rows = grain.MapDataset.range(len(windows)).map(
        lambda i: cut(corpus, *windows[i], length=length)
    )
    if shuffle_seed is not None:
        rows = rows.shuffle(seed=shuffle_seed)
    batches = rows.repeat().batch(batch_size)

    def batch_at(step: int) -> Batch:
        batch = batches[step]
        assert batch is not None, "no transformation above filters rows"
        return batch

    return batch_at


def packed_windows(corpus: Corpus, length: int) -> Int64[np.ndarray, "R 2"]:
    """[rows, (start, stop)]: the stream cut every `length` tokens.

    Not best fit: nothing is padded but the last row, nothing is dropped, and the rows do not depend
    on a search. The price is that a document cut by a row's edge goes on in the next row without
    what came before; its token at the edge still has its target.
    """
    starts = np.arange(0, len(corpus.tokens), length)
    return np.stack([starts, np.minimum(starts + length, len(corpus.tokens))], axis=1)


def document_windows(corpus: Corpus, length: int) -> Int64[np.ndarray, "D 2"]:
    """[documents, (start, stop)]: one document a row, without what exceeds `length` tokens."""
    starts = corpus.starts(np.arange(len(corpus.ends)))
    return np.stack([starts, np.minimum(starts + length, corpus.ends)], axis=1)


def cut(corpus: Corpus, start: int | np.integer, stop: int | np.integer, *, length: int) -> Row:
    """The row of the window [start, stop), padded to `length`."""
    at = np.arange(start, stop)
    document = np.searchsorted(corpus.ends, at, side="right")
    has_target = at + 1 < corpus.ends[document]
    target = np.where(has_target, corpus.tokens[np.minimum(at + 1, corpus.ends[-1] - 1)], 0)
    row = {
        "tokens": corpus.tokens[start:stop],
        "targets": target,
        "positions": at - np.maximum(corpus.starts(document), start),
        "segment_ids": document - document[0] + 1,
    }
    padded = {name: _pad(values.astype(np.int32), length) for name, values in row.items()}
    return padded | {"target_weights": _pad(has_target.astype(np.float32), length)}


def _pad(values: np.ndarray, length: int) -> np.ndarray:
    return np.pad(values, (0, length - len(values)))
