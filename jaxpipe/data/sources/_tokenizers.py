"""Text to token ids and back: bytes, or a tokenizer of Hugging Face or of sentencepiece."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from ..._input import MEGABYTE, clause, is_file, read_bytes, read_text, short_repr, shorten

if TYPE_CHECKING:
    import sentencepiece
    import tokenizers

_MAX_BYTES = 128 * MEGABYTE
"""The largest file of a tokenizer that is read; the largest published ones have 35 MB."""

# What the well-known tokenizers call the token that ends a document, tried in this order, special
# tokens first: Gemma's have `</s>` as a tag of HTML.
END_OF_DOCUMENT = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek's
)


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of a tokenizer.

    Attributes:
        vocab_size: One more than the largest id.
        eod: The id that ends a document. `encode` never adds it.
        ids: All ids of tokens, of which there may be fewer than `vocab_size`.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def eod(self) -> int: ...
    @property
    def ids(self) -> Int32[np.ndarray, " n"]: ...
    def encode(self, text: str) -> Int32[np.ndarray, " N"]: ...
    def decode(self, ids: Sequence[int] | Int32[np.ndarray, " N"]) -> str: ...


@dataclass(frozen=True)
class ByteTokenizer:
    """A tokenizer without a file: UTF-8 bytes are ids 0 to 255, and 256 ends a document.

    Example:
        >>> ByteTokenizer().encode("hi").tolist()
        [104, 105]
    """

    vocab_size: int = 257
    eod: int = 256

    @property
    def ids(self) -> Int32[np.ndarray, " n"]:
        return np.arange(self.vocab_size, dtype=np.int32)

    def encode(self, text: str) -> Int32[np.ndarray, " N"]:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | Int32[np.ndarray, " N"]) -> str:
        """Returns the text without ends of documents. Bytes that are not UTF-8 become U+FFFD."""
        # A model may sample ids that only pad its vocabulary: 0xFF is a byte UTF-8 never has.
        return bytes(min(int(i), 0xFF) for i in ids if i != self.eod).decode("utf-8", "replace")


@dataclass(frozen=True)
class HuggingFaceTokenizer:
    """A tokenizer.json, without the special tokens that it would add; see `load_tokenizer`."""

    tokenizer: "tokenizers.Tokenizer"
    vocab_size: int
    eod: int

    @property
    def ids(self) -> Int32[np.ndarray, " n"]:
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        return np.asarray(sorted(vocabulary.values()), np.int32)

    def encode(self, text: str) -> Int32[np.ndarray, " N"]:
        try:
            encoded = self.tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the Rust side raises plain Exception
            raise ValueError(
                f"The tokenizer cannot encode {short_repr(text, 40)}: {clause(error, 300)}. "
                "Repair the tokenizer.json that `tokenizer_path` names: it may lack its token for "
                "unknown words."
            ) from None
        return np.asarray(encoded.ids, np.int32)

    def decode(self, ids: Sequence[int] | Int32[np.ndarray, " N"]) -> str:
        """Returns the text without special tokens."""
        return self.tokenizer.decode([int(i) for i in ids])


@dataclass(frozen=True)
class SentencePieceTokenizer:
    """A sentencepiece .model, without the beginning and end of sentence that it could add."""

    processor: "sentencepiece.SentencePieceProcessor"
    vocab_size: int
    eod: int

    @property
    def ids(self) -> Int32[np.ndarray, " n"]:
        return np.arange(self.vocab_size, dtype=np.int32)

    def encode(self, text: str) -> Int32[np.ndarray, " N"]:
        # Most models read a newline as a blank.
        return np.asarray(self.processor.encode(text), np.int32)

    def decode(self, ids: Sequence[int] | Int32[np.ndarray, " N"]) -> str:
        """Returns the text without ends of documents and ids that only pad a vocabulary."""
        return self.processor.decode([int(i) for i in ids if i < self.vocab_size])


def load_tokenizer(path: str, *, vocab_size: int) -> Tokenizer:
    """Loads the tokenizer at `path`.

    Args:
        path: A Hugging Face tokenizer.json, a sentencepiece .model, or "" for bytes.
        vocab_size: The number of rows of the model's embedding.

    Returns:
        The tokenizer.

    Raises:
        ValueError: If the file does not exist or is no tokenizer, sentencepiece is not installed,
            the tokenizer has no token that ends a document, or it has ids that the model's
            embedding has no row for.

    Example:
        >>> load_tokenizer("", vocab_size=320).vocab_size
        257
    """
    if path and not is_file(path):
        raise ValueError(f'`tokenizer_path` is {path!r}, which is not a file. Give "" for bytes.')
    load = _load_sentencepiece if path.endswith(".model") else _load_hugging_face
    tokenizer = load(path) if path else ByteTokenizer()
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"`vocab_size` is {vocab_size} and the tokenizer {path or 'of bytes'!r} has "
            f"{tokenizer.vocab_size} ids. Make `vocab_size` at least {tokenizer.vocab_size}."
        )
    return tokenizer


def _load_sentencepiece(path: str) -> SentencePieceTokenizer:
    try:
        import sentencepiece
    except ImportError as error:
        raise ValueError(
            f"`tokenizer_path` is {path!r}, which needs sentencepiece, and it cannot be imported "
            f'({error}). `pip install "jaxpipe[data]"`.'
        ) from error
    processor = sentencepiece.SentencePieceProcessor()
    data = read_bytes(path, most_bytes=_MAX_BYTES)
    try:
        processor.LoadFromSerializedProto(data)
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"`tokenizer_path` is {path!r}, which is not a model of sentencepiece: "
            f"{shorten(str(error), 300)}"
        ) from None
    if processor.eos_id() < 0:
        raise ValueError(
            f"`tokenizer_path` is {path!r}, which has no token that ends a sentence. Train it with "
            "`eos_id`."
        )
    return SentencePieceTokenizer(processor, processor.get_piece_size(), processor.eos_id())


def _load_hugging_face(path: str) -> HuggingFaceTokenizer:
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_str(read_text(path, most_bytes=_MAX_BYTES))
    except ValueError:
        raise
    except BaseException as error:  # the Rust side raises plain Exception, or panics
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise ValueError(
            f"`tokenizer_path` is {path!r}, which is not a tokenizer.json: "
            f"{shorten(str(error), 300)}"
        ) from None
    # The file may say how a model that reads single sentences cuts and fills them.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids: dict[str, Any] = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    ends = [token for token in END_OF_DOCUMENT if token in ids]
    end = next((token for token in ends if token in special), ends[0] if ends else None)
    if end is None:
        raise ValueError(
            f"`tokenizer_path` is {path!r}, which has no token that ends a document. Add one of "
            f"{', '.join(END_OF_DOCUMENT)} to its added tokens."
        )
    # A document that talks about the token does not end there. Some files do not call it special.
    tokenizer.add_special_tokens([end])
    tokenizer.encode_special_tokens = True
    # Ids can have gaps, so the count of tokens is not enough.
    return HuggingFaceTokenizer(tokenizer, vocab_size=max(ids.values()) + 1, eod=ids[end])
