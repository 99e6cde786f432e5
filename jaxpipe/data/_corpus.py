"""Documents as one stream of tokens: [N] ids, every document closed by an end-of-document id.

D documents.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer

from ._documents import read_documents
from ._source import Source
from ._token_files import TokenFiles, open_token_files
from ._tokenizers import Tokenizer


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents, one behind the other.

    Attributes:
        tokens: Ids, the last of each document being the end of document. They may hold documents
            that do not belong to the stream.
        ends: [D] where each document ends in the stream (exclusive), so the last entry is N.
        shifts: [D] how much further on a document lies in `tokens` than in the stream.
    """

    tokens: Integer[np.ndarray, " n"] | TokenFiles
    ends: Int64[np.ndarray, " D"]
    shifts: Int64[np.ndarray, " D"]

    def __len__(self) -> int:
        """N."""
        return int(self.ends[-1])

    def starts(self, documents: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Where some documents start in the stream."""
        return np.where(documents > 0, self.ends[documents - 1], 0)

    def documents_at(self, places: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """The documents that places of the stream belong to."""
        return np.searchsorted(self.ends, places, side="right")

    def ids(self, places: Int64[np.ndarray, " n"]) -> Int32[np.ndarray, " n"]:
        """The tokens at some places of the stream."""
        return self.tokens[places + self.shifts[self.documents_at(places)]].astype(np.int32)


def corpus_from_tokens(
    tokens: Integer[np.ndarray, " N"] | TokenFiles, ends: Int64[np.ndarray, " D"]
) -> Corpus:
    """All of `tokens`, with documents that end where `ends` says."""
    return Corpus(tokens, ends, np.broadcast_to(np.int64(0), ends.shape))


def tokenize(documents: Iterable[str], tokenizer: Tokenizer) -> Corpus:
    """The documents as one stream, in order. There must be at least one."""
    end = np.asarray([tokenizer.eod], np.int32)
    pieces = [np.concatenate([tokenizer.encode(text), end]) for text in documents]
    return corpus_from_tokens(np.concatenate(pieces), np.cumsum([len(piece) for piece in pieces]))


def read_corpus(
    source: Source, tokenizer: Tokenizer | None, *, vocab_size: int, key: str = "data_files"
) -> Corpus:
    """The documents of a source.

    Those of text are tokenised and held in memory, 4 bytes a token. Files of tokens stay where they
    are.

    Args:
        source: Of any type.
        tokenizer: For all types but `tokens`.
        vocab_size: Rows of the model's embedding.
        key: What errors call the source's files.

    Raises:
        ValueError: If a file is not there, or does not hold what the source says.
    """
    if source.type == "tokens":
        return corpus_from_tokens(*open_token_files(source, vocab_size=vocab_size, key=key))
    assert tokenizer is not None, "text is tokenised"
    return tokenize(read_documents(source, key=key), tokenizer)


def select_documents(corpus: Corpus, chosen: Bool[np.ndarray, " D"]) -> Corpus:
    """The stream of some of the documents, of which there must be one. Copies no tokens."""
    documents = np.flatnonzero(chosen)
    starts = corpus.starts(documents)
    ends = np.cumsum(corpus.ends[documents] - starts)
    shifts = corpus.shifts[documents] + corpus.ends[documents] - ends
    return Corpus(corpus.tokens, ends, shifts)


def corpus_fingerprint(corpus: Corpus) -> dict[str, int]:
    """What JSON can keep of a corpus, by which another one is told from it."""
    tokens = corpus.tokens
    of_tokens = tokens.checksum if isinstance(tokens, TokenFiles) else _crc32(tokens)
    checksum = _crc32(corpus.shifts, _crc32(corpus.ends, of_tokens))
    return {"tokens": len(corpus), "documents": len(corpus.ends), "checksum": checksum}


def _crc32(numbers: Integer[np.ndarray, " n"], before: int = 0) -> int:
    """Of an array's bytes, without a copy of them where they lie in one piece."""
    return crc32(np.ascontiguousarray(numbers).data, before)


def split_held_out(
    corpus: Corpus, *, fraction: float, seed: int | tuple[int, ...]
) -> tuple[Corpus, Corpus]:
    """The documents that stay, and those that are held out.

    Each is held out with probability `fraction`, by its number and the seed alone: documents that
    are added behind the others move none of them.

    Raises:
        ValueError: If one of the two has no document.
    """
    num_documents = len(corpus.ends)
    out = np.random.default_rng(seed).random(num_documents) < fraction
    if out.all() or not out.any():
        raise ValueError(
            f"`eval_split_fraction` is {fraction:g}, which holds out {out.sum()} of "
            f"{num_documents} documents, and both sides need one. Change it or "
            "`eval_split_seed`, or give evaluation files of its own."
        )
    return select_documents(corpus, ~out), select_documents(corpus, out)
