"""Files of token ids, mapped into memory and never loaded: .npy, or .bin without a header.

F files of N tokens in all, D documents.
"""

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64, Integer

from ..._input import short_list
from ._source_config import Source, resolve_files

CHUNK_TOKENS = 1 << 24
"""The number of tokens that are checked at a time."""

Version = tuple[int, ...]
"""What a file system says of a file that it has written to: equal if it has not."""


class LostFileError(RuntimeError):
    """A file that was there when the run began has gone, or has another size or other ids."""


@dataclass(frozen=True, eq=False)
class TokenFile:
    """A file of token ids."""

    path: Path
    tokens: Integer[np.ndarray, " n"]  # [n] the ids, mapped into memory
    num_bytes: int  # the size of the file when it was opened
    version: Version  # before anything was read

    def __getitem__(self, offsets: Int64[np.ndarray, " n"]) -> Integer[np.ndarray, " n"]:
        # Where the pages of a mapping are gone, as after a truncation or on a network's file
        # system, reading them ends the process without a word.
        _check_unchanged(self.path, self.num_bytes)
        return self.tokens[offsets]


@dataclass(frozen=True, eq=False)
class TokenFiles:
    """Several files as one stream of ids."""

    files: tuple[TokenFile, ...]  # the F files, in order
    ends: Int64[np.ndarray, " F"]  # [F] the offset at which each file ends, exclusive
    checksum: int  # the CRC-32 of all ids
    versions: list[Version]  # of the F files when they last had this checksum

    def __getitem__(self, offsets: Int64[np.ndarray, " n"]) -> Integer[np.ndarray, " n"]:
        """Returns the ids at some offsets of the joined files."""
        file_of = np.searchsorted(self.ends, offsets, side="right")
        tokens = np.empty(len(offsets), np.int64)
        for i in np.unique(file_of):
            is_in_file = file_of == i
            start = self.ends[i - 1] if i else 0
            tokens[is_in_file] = self.files[i][offsets[is_in_file] - start]
        return tokens

    def check_ids(self) -> None:
        """Raises LostFileError if the files hold other ids than when they were opened.

        They are read again only if the file system says that one of them has been written to.
        """
        versions = [_version(file.path) for file in self.files]
        changed = [
            file.path
            for file, old, new in zip(self.files, self.versions, versions, strict=True)
            if old != new
        ]
        if not changed:
            return
        checksum = 0
        try:
            for file in self.files:
                # By its name: a mapping still shows the old file if another one has its name now.
                again = _open_token_file(file.path, file.tokens.dtype.name)
                for tokens in _chunks(again):
                    checksum = _checksum(tokens, checksum)
        except ValueError:
            checksum = -1
        if checksum != self.checksum:
            raise LostFileError(
                f"{short_list(map(str, changed))} had other ids when the run began. Steps since "
                "the newest checkpoint are dropped. Put the old ids back; the run goes on from it."
            )
        self.versions[:] = versions


def open_token_files(
    source: Source, *, vocab_size: int, key: str = "data_files"
) -> tuple[TokenFiles, Int64[np.ndarray, " D"]]:
    """Opens the files of a source and finds the ends [D] of their documents, exclusive."""
    # Every file is read once, in chunks: a few seconds for each gigabyte, of which 8 bytes for each
    # document are kept. A file that does not end with an end of document ends with a document all
    # the same.
    eod = source.token_eod
    assert eod is not None, "the source's own check"
    if eod >= vocab_size:
        raise ValueError(
            f"`token_eod` is {eod} and `vocab_size` is {vocab_size}, so ids end at "
            f"{vocab_size - 1}. Make `vocab_size` at least {eod + 1}, or correct `token_eod`."
        )
    paths = [file for path in source.files for file in resolve_files(path, "tokens", key=key)]
    files = [_open_token_file(Path(str(path)), source.token_dtype) for path in paths]
    ends, checksum, start, has_end = [], 0, 0, False
    for file in files:
        file_ends, checksum = _scan_documents(file, eod, vocab_size, checksum)
        has_end = has_end or len(file_ends) > 0
        if not len(file_ends) or file_ends[-1] != len(file.tokens):
            file_ends = np.append(file_ends, len(file.tokens))
        ends.append(start + file_ends)
        start += len(file.tokens)
    if not has_end:
        raise ValueError(
            f"`token_eod` is {eod}, which {str(files[0].path)!r} does not hold, nor does any other "
            f"file of `{key}`: each would be one document. Give the id that ends theirs."
        )
    of_files = np.cumsum([len(file.tokens) for file in files])
    versions = [file.version for file in files]
    return TokenFiles(tuple(files), of_files, checksum, versions), np.concatenate(ends)


def _open_token_file(path: Path, dtype: str) -> TokenFile:
    try:
        path.open("rb").close()
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}.") from None
    size, version = path.stat().st_size, _version(path)
    if path.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise ValueError(f"{str(path)!r} is not an .npy file: {error}") from None
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(
                f"{str(path)!r} holds {tokens.dtype}{list(tokens.shape)}. Give a flat array of "
                "integers."
            )
    else:
        token_dtype = np.dtype(dtype).newbyteorder("<")
        if size % token_dtype.itemsize:
            raise ValueError(
                f"{str(path)!r} has {size} bytes, which are no whole number of {dtype}. Set "
                "`token_dtype` to what it holds."
            )
        tokens = np.memmap(path, token_dtype, mode="r") if size else np.zeros(0, token_dtype)
    if not len(tokens):
        raise ValueError(f"{str(path)!r} holds no token. Remove it.")
    return TokenFile(path, tokens, size, version)


def _scan_documents(
    file: TokenFile, eod: int, vocab_size: int, checksum: int
) -> tuple[Int64[np.ndarray, " d"], int]:
    """Returns the ends of the documents of a file, and the checksum continued over its ids."""
    ends, start = [], 0
    for tokens in _chunks(file):
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            bad = int(np.argmax((tokens < 0) | (tokens >= vocab_size)))
            raise ValueError(
                f"{str(file.path)!r} has the id {tokens[bad]} at token {start + bad}, and "
                f"`vocab_size` is {vocab_size}. Raise it, or correct `token_dtype`."
            )
        ends.append(np.flatnonzero(tokens == eod) + start + 1)
        checksum = _checksum(tokens, checksum)
        start += len(tokens)
    return np.concatenate(ends), checksum


def _chunks(file: TokenFile) -> Iterator[Integer[np.ndarray, " n"]]:
    """Yields the ids of a file, `CHUNK_TOKENS` at a time."""
    for start in range(0, len(file.tokens), CHUNK_TOKENS):
        _check_unchanged(file.path, file.num_bytes)
        yield np.asarray(file.tokens[start : start + CHUNK_TOKENS])


def _checksum(tokens: Integer[np.ndarray, " n"], before: int) -> int:
    """Returns a checksum continued over some ids."""
    # In int32, so that equal tokens have equal checksums in files of any dtype and in memory.
    return zlib.crc32(tokens.astype("<i4").data, before)


def _version(path: Path) -> Version:
    """Returns the version of a file. Reading the file does not change it."""
    stat = _stat(path)
    # The time of the last change too, as `touch -d` and `cp -p` set that of the last write.
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _check_unchanged(path: Path, num_bytes: int) -> None:
    """Raises LostFileError if a file has gone or has another size."""
    size = _stat(path).st_size
    if size != num_bytes:
        raise LostFileError(
            f"{str(path)!r} had {num_bytes} bytes when the run began, and has {size} now. Put the "
            "old one back; the run goes on from its newest checkpoint."
        )


def _stat(path: Path) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise LostFileError(
            f"{str(path)!r} was there when the run began, and cannot be read any more: "
            f"{error.strerror}. Put it back; the run goes on from its newest checkpoint."
        ) from None
