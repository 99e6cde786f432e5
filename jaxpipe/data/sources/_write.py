"""Documents as a file of tokens, so that no later start has to tokenise them or hold them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..._durable import failed_write, fsync, rename
from ._tokenizers import Tokenizer


@dataclass(frozen=True)
class TokenFileSummary:
    """The content of a file of tokens, and the settings to read it."""

    num_tokens: int  # the number of ids, including those that end documents
    num_documents: int  # the number of documents, at least one
    token_dtype: str  # uint16, or uint32 if the tokenizer has more ids
    token_eod: int  # the id after each document


def write_tokens(file: Path, documents: Iterable[str], tokenizer: Tokenizer) -> TokenFileSummary:
    """Writes the ids of all documents to a file, little-endian and without a header.

    Documents are tokenized one at a time. Until the file is complete its name ends with
    `.partial`; a failure removes it.

    Args:
        file: The new file, whose name ends with .bin.
        documents: The texts of the documents.
        tokenizer: The tokenizer of the texts.

    Returns:
        The counts, and the settings with which the file is read.

    Raises:
        ValueError: If the file's name does not end with .bin, it is there already or being
            written, or it cannot be written because of its path.
        DiskError: If the disk is full or fails.

    Example:
        >>> import tempfile
        >>> from jaxpipe.data.sources import ByteTokenizer
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_tokens(Path(folder, "corpus.bin"), ["ab", "c"], ByteTokenizer())
        TokenFileSummary(num_tokens=5, num_documents=2, token_dtype='uint16', token_eod=256)
    """
    if file.suffix != ".bin":
        raise ValueError(f"{str(file)!r} does not end with .bin, by which it is read. Rename it.")
    partial = file.with_name(file.name + ".partial")
    try:
        with _open_new(partial) as out:
            if file.exists():
                raise ValueError(
                    f"{str(file)!r} is there already. Remove it, or choose another name."
                )
            written = _write(out, documents, tokenizer)
            out.close()  # which may be what fills the disk
            fsync(partial)
            rename(partial, file)
    except FileExistsError:
        raise ValueError(
            f"{str(partial)!r} is there: another command is writing it, or one was killed before "
            "it was complete. Wait for that, or remove it."
        ) from None
    except OSError as error:
        raise failed_write(
            f"{str(file)!r} cannot be written: {error.strerror}. Choose a folder that is there, "
            "that you may write to, and that has room.",
            error,
        ) from None
    return written


@contextmanager
def _open_new(file: Path) -> Iterator[BinaryIO]:
    """Opens a new file, and removes it if the body fails."""
    with file.open("xb") as out:
        try:
            yield out
        except BaseException:
            file.unlink(missing_ok=True)
            raise


def _write(out: BinaryIO, documents: Iterable[str], tokenizer: Tokenizer) -> TokenFileSummary:
    dtype = np.dtype("uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32")
    num_tokens = num_documents = 0
    for document in documents:
        ids = np.append(tokenizer.encode(document), tokenizer.eod)
        out.write(ids.astype(dtype.newbyteorder("<")).tobytes())
        num_tokens, num_documents = num_tokens + len(ids), num_documents + 1
    return TokenFileSummary(num_tokens, num_documents, dtype.name, tokenizer.eod)
