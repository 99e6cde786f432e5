"""Rows of a corpus: windows of its stream, padded with zeros.

T tokens a row. `segment_ids` count its documents from 1 (0 is padding), `positions` restart with
each of them, and a target is the next token of the same document; where there is none its weight is
0.
"""

from dataclasses import dataclass

import numpy as np

from ._corpus import Corpus

Row = dict[str, np.ndarray]
"""[T] tokens, targets, positions, segment_ids (int32) and target_weights (float32, 0 or 1)."""


@dataclass(frozen=True)
class CorpusRows:
    """The rows of a corpus. Each is made when it is indexed.

    With `packing` the stream is cut every T tokens. No row but the last is padded, no token is
    dropped, and no search for documents that fit is needed. The price is that a document which is
    cut at the end of a row continues in the next row without the tokens before the cut; the last
    token before the cut still has its target. Without `packing` a row is one document, of which
    tokens beyond T are dropped.
    """

    corpus: Corpus  # the tokens of all documents
    length: int  # T, the tokens of a row
    packing: bool  # whether a row may have several documents

    def __len__(self) -> int:
        return -(-len(self.corpus) // self.length) if self.packing else len(self.corpus.ends)

    def __getitem__(self, row: int) -> Row:
        return make_row(self.corpus, *self.window(row), length=self.length)

    def window(self, row: int) -> tuple[int, int]:
        """Returns the offsets in the stream where a row starts and stops."""
        if self.packing:
            start, end = row * self.length, len(self.corpus)
        else:
            start = int(self.corpus.ends[row - 1]) if row else 0
            end = int(self.corpus.ends[row])
        return start, min(start + self.length, end)

    def num_targets(self, row: int) -> int:
        """Returns the sum of `target_weights`: all but the last token of a document count."""
        start, stop = self.window(row)
        first, last = np.searchsorted(self.corpus.ends, (start, stop), side="right")
        return stop - start - int(last - first)


def make_row(corpus: Corpus, start: int, stop: int, *, length: int) -> Row:
    """Returns the row of the window [start, stop) of the stream, padded to `length`."""
    offsets = np.arange(start, stop)
    document = corpus.documents_at(offsets)
    has_target = offsets + 1 < corpus.ends[document]
    row = {
        "tokens": corpus.ids(offsets),
        "targets": np.where(has_target, corpus.ids(np.minimum(offsets + 1, len(corpus) - 1)), 0),
        "positions": offsets - np.maximum(corpus.starts(document), start),
        "segment_ids": document - document[0] + 1,
    }
    padded = {name: _pad(values.astype(np.int32), length) for name, values in row.items()}
    return padded | {"target_weights": _pad(has_target.astype(np.float32), length)}


def empty_row(length: int) -> Row:
    """Returns a row of padding alone."""
    names = ("tokens", "targets", "positions", "segment_ids")
    zeros = {name: np.zeros(length, np.int32) for name in names}
    return zeros | {"target_weights": np.zeros(length, np.float32)}


def _pad(values: np.ndarray, length: int) -> np.ndarray:
    return np.pad(values, (0, length - len(values)))


def global_batch_size(per_device_batch_size: float, num_devices: int) -> int:
    """Returns the number of rows of one step on all devices, which may share a row.

    Example:
        >>> global_batch_size(0.5, 8)
        4
    """
    rows = per_device_batch_size * num_devices
    if rows < 1 or rows != round(rows):
        raise ValueError(
            f"`per_device_batch_size` = {per_device_batch_size:g} on {num_devices} devices makes "
            f"{rows:g} rows. Choose it so that the product is a whole number."
        )
    return round(rows)
