"""Text files to one stream of tokens: [N] ids, every document closed by an end-of-document id."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Int64

from ._tokenizers import Tokenizer

BUILTIN = "builtin:"


@dataclass(frozen=True)
class Corpus:
    """Documents, one behind the other.

    Attributes:
        tokens: [N] ids; the last of each document is the tokenizer's end of document.
        ends: [D] where each document ends in `tokens` (exclusive), so the last entry is N.
    """

    tokens: Int32[np.ndarray, " N"]
    ends: Int64[np.ndarray, " D"]

    def starts(self, documents: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Where some documents start in `tokens`."""
        return np.where(documents > 0, self.ends[documents - 1], 0)


def tokenize(documents: Sequence[str], tokenizer: Tokenizer) -> Corpus:
    """The documents as one stream, in order. There must be at least one."""
    end = np.asarray([tokenizer.eod], np.int32)
    pieces = [np.concatenate([tokenizer.encode(text), end]) for text in documents]
    return Corpus(np.concatenate(pieces), np.cumsum([len(piece) for piece in pieces]))


def read_documents(paths: Sequence[str], *, separator: str) -> list[str]:
    """All documents of some text files, in order.

    Args:
        paths: Files; folders, for all their *.txt at any depth in sorted order; or
            `builtin:sonnets`, which ships with the package.
        separator: What stands between two documents of a file; "" if a file is one document.

    Raises:
        ValueError: If a path does not exist or holds no text, or a file is not UTF-8.
    """
    documents: list[str] = []
    for path in paths:
        found = [text for file in _files(path) for text in _split(_read(file), separator)]
        if not found:
            raise ValueError(
                f"`text_files` names {path!r}, which holds no document: all of it is blank, or a "
                "folder without *.txt files. Remove it or give a file with text."
            )
        documents += found
    return documents


def _files(path: str) -> list[Path] | list[Traversable]:
    if path.startswith(BUILTIN):
        return [_builtin(path)]
    if Path(path).is_dir():
        return sorted(file for file in Path(path).rglob("*.txt") if file.is_file())
    if not Path(path).is_file():
        raise ValueError(
            f"`text_files` names {path!r}, which does not exist. Give a file, a folder or "
            f"{BUILTIN}sonnets."
        )
    return [Path(path)]


def _builtin(path: str) -> Traversable:
    folder = resources.files("jaxpipe.data").joinpath("text")
    names = sorted(file.name.removesuffix(".txt") for file in folder.iterdir())
    name = path.removeprefix(BUILTIN)
    if name not in names:
        valid = ", ".join(BUILTIN + name for name in names)
        raise ValueError(f"`text_files` names {path!r}. Built in: {valid}.")
    return folder.joinpath(f"{name}.txt")


def _read(file: Path | Traversable) -> str:
    data = file.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{str(file)!r} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}. "
            "Convert it, for example with iconv."
        ) from None
    # As text files open everywhere: separators are written with \n.
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _split(text: str, separator: str) -> Iterator[str]:
    """The pieces between separators without blank lines around them; blank pieces are none."""
    for piece in text.split(separator) if separator else [text]:
        if piece.strip():
            yield piece.strip("\n")
