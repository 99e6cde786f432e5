"""Documents as a file of tokens, so that no later start has to tokenise them or hold them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ._tokenizers import Tokenizer


@dataclass(frozen=True)
class Written:
    """What a file of tokens holds, and how it is read.

    Attributes:
        num_tokens: With the ends of documents.
        num_documents: At least one.
        token_dtype: uint16, or uint32 where the tokenizer has more ids.
        token_eod: The id behind each document.
    """

    num_tokens: int
    num_documents: int
    token_dtype: str
    token_eod: int


def write_tokens(file: Path, documents: Iterable[str], tokenizer: Tokenizer) -> Written:
    """Writes the ids of all documents, little-endian and without a header; one is held at a time.

    Until it is complete the file has `.partial` behind its name.

    Raises:
        ValueError: If the file's name does not end with .bin, or it is there already.
    """
    if file.suffix != ".bin":
        raise ValueError(f"{str(file)!r} does not end with .bin, by which it is read. Rename it.")
    if file.exists():
        raise ValueError(f"{str(file)!r} is there already. Remove it, or choose another name.")
    dtype = np.dtype("uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32")
    num_tokens = num_documents = 0
    partial = file.with_name(file.name + ".partial")
    with partial.open("wb") as out:
        for document in documents:
            ids = np.append(tokenizer.encode(document), tokenizer.eod)
            out.write(ids.astype(dtype.newbyteorder("<")).tobytes())
            num_tokens, num_documents = num_tokens + len(ids), num_documents + 1
    partial.rename(file)
    return Written(num_tokens, num_documents, dtype.name, tokenizer.eod)
