"""Documents as one stream of tokens, [N] ids, and rows: windows of the stream, padded with zeros.

Every document is closed by an end-of-document id. `segment_ids` count the documents of a row from 1
(0 is padding), `positions` restart with each of them, and a target is the next token of the same
document; where there is none its weight is 0.

D documents, T tokens a row.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer

from ..sources._documents import read_documents
from ..sources._source_config import Source
from ..sources._token_files import TokenFiles, open_token_files
from ..sources._tokenizers import Tokenizer


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents as one stream of N tokens.

    Attributes:
        tokens: Ids, the last of each document being the end of document. They may hold documents
            that do not belong to the stream.
        ends: [D] where each document ends in the stream (exclusive), so the last entry is N.
        shifts: [D] the offset of each document in `tokens`, less its offset in the stream.
    """

    tokens: Integer[np.ndarray, " n"] | TokenFiles
    ends: Int64[np.ndarray, " D"]
    shifts: Int64[np.ndarray, " D"]

    def __len__(self) -> int:
        """Returns N, the number of tokens of the stream."""
        return int(self.ends[-1])

    def starts(self, documents: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Returns the offsets at which some documents start in the stream."""
        return np.where(documents > 0, self.ends[documents - 1], 0)

    def documents_at(self, offsets: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Returns the index of the document at each of some offsets of the stream."""
        return np.searchsorted(self.ends, offsets, side="right")

    def ids(self, offsets: Int64[np.ndarray, " n"]) -> Int32[np.ndarray, " n"]:
        """Returns the token ids at some offsets of the stream."""
        return self.tokens[offsets + self.shifts[self.documents_at(offsets)]].astype(np.int32)


def corpus_from_tokens(
    tokens: Integer[np.ndarray, " N"] | TokenFiles, ends: Int64[np.ndarray, " D"]
) -> Corpus:
    """Returns the corpus of all `tokens`, whose documents end at the offsets `ends`.

    Example:
        >>> len(corpus_from_tokens(np.asarray([5, 6, 0, 7, 0]), np.asarray([3, 5])))
        5
    """
    return Corpus(tokens, ends, np.broadcast_to(np.int64(0), ends.shape))


def tokenize(documents: Iterable[str], tokenizer: Tokenizer) -> Corpus:
    """Tokenizes documents and joins them to one stream, in order.

    Example:
        >>> from jaxpipe.data.sources import ByteTokenizer
        >>> len(tokenize(["ab", "c"], ByteTokenizer()))
        5
    """
    end = np.asarray([tokenizer.eod], np.int32)
    streams = [np.concatenate([tokenizer.encode(text), end]) for text in documents]
    return corpus_from_tokens(np.concatenate(streams), np.cumsum([len(ids) for ids in streams]))


def read_corpus(
    source: Source, tokenizer: Tokenizer | None, *, vocab_size: int, key: str = "data_files"
) -> Corpus:
    """Reads the documents of a source, text into 4 bytes of memory a token; tokens are mapped."""
    if source.type == "tokens":
        corpus = corpus_from_tokens(*open_token_files(source, vocab_size=vocab_size, key=key))
    else:
        assert tokenizer is not None, "text is tokenised"
        corpus = tokenize(read_documents(source, key=key), tokenizer)
    if len(corpus) == len(corpus.ends):
        raise ValueError(
            f"The {len(corpus.ends)} documents of `{key}` are all empty but for their ends, so no "
            "token has a target. Give a longer document."
        )
    return corpus


def select_documents(corpus: Corpus, chosen: Bool[np.ndarray, " D"]) -> Corpus:
    """Returns the stream of the chosen documents, at least one. Copies no tokens."""
    documents = np.flatnonzero(chosen)
    starts = corpus.starts(documents)
    ends = np.cumsum(corpus.ends[documents] - starts)
    shifts = corpus.shifts[documents] + corpus.ends[documents] - ends
    return Corpus(corpus.tokens, ends, shifts)


def check_files(corpora: Iterable[Corpus]) -> None:
    """Raises LostFileError if files of tokens hold other ids than when they were opened."""
    for tokens in {corpus.tokens for corpus in corpora if isinstance(corpus.tokens, TokenFiles)}:
        tokens.check_ids()


def corpus_fingerprint(corpus: Corpus) -> dict[str, int]:
    """Returns counts and a checksum, as JSON values, that differ for different corpora."""
    tokens = corpus.tokens
    tokens_checksum = tokens.checksum if isinstance(tokens, TokenFiles) else _crc32(tokens)
    checksum = _crc32(corpus.shifts, _crc32(corpus.ends, tokens_checksum))
    return {"tokens": len(corpus), "documents": len(corpus.ends), "checksum": checksum}


def _crc32(array: Integer[np.ndarray, " n"], before: int = 0) -> int:
    """Returns the CRC-32 of the bytes of an array, which are not copied if contiguous."""
    return crc32(np.ascontiguousarray(array).data, before)


def split_held_out(
    corpus: Corpus,
    *,
    fraction: float,
    seed: int | tuple[int, ...],
    remedy: str = "Change it or `eval_split_seed`, or give evaluation files of its own.",
) -> tuple[Corpus, Corpus]:
    """Splits a corpus into the documents that stay and those that are held out.

    Each document is held out with probability `fraction`, which depends on its index and the seed
    alone: appending documents does not change the side of the earlier ones. `remedy` ends the error
    about a split that leaves one side empty.

    Example:
        >>> from jaxpipe.data.sources import ByteTokenizer
        >>> corpus = tokenize([f"document {i}" for i in range(100)], ByteTokenizer())
        >>> stays, held_out = split_held_out(corpus, fraction=0.1, seed=0)
        >>> len(stays.ends), len(held_out.ends)
        (90, 10)
    """
    num_documents = len(corpus.ends)
    out = np.random.default_rng(seed).random(num_documents) < fraction
    if out.all() or not out.any():
        raise ValueError(
            f"`eval_split_fraction` is {fraction:g}, which holds out {out.sum()} of "
            f"{num_documents} documents, and both sides need one. {remedy}"
        )
    return select_documents(corpus, ~out), select_documents(corpus, out)


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
        return _make_row(self.corpus, *self.window(row), length=self.length)

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


def _make_row(corpus: Corpus, start: int, stop: int, *, length: int) -> Row:
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
