"""Text and JSONL files as documents, and the documents of any source of text."""

import json
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path

from ..._input import MAX_JSON_BYTES, parse_json, short_list, shorten
from ._source_config import Source, resolve_files
from ._tables import arrow_documents, parquet_documents


def read_documents(source: Source, *, key: str = "data_files") -> Iterator[str]:
    """Yields all documents of a source of text, in order, one at a time.

    Args:
        source: The source, of any type but `tokens`.
        key: The config key that errors name.

    Yields:
        The text of each document.

    Raises:
        ValueError: If a path does not exist or holds no document, or a file does not hold what the
            source says, with the line or row.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "two.jsonl")
        ...     _ = file.write_text(json.dumps({"text": "a"}))
        ...     list(read_documents(Source(type="jsonl", files=str(file))))
        ['a']
    """
    for path in source.files:
        is_empty = True
        for file in resolve_files(path, source.type, key=key):
            try:
                for document in _documents_in_file(file, source):
                    is_empty = False
                    yield document
            except OSError as error:
                raise ValueError(
                    f"{str(file)!r}, of `{key}`, cannot be read: {error.strerror}."
                ) from None
        if is_empty:
            raise ValueError(
                f"`{key}` names {path!r}, which holds no document. Remove it or give one that does."
            )


def _documents_in_file(file: Path | Traversable, source: Source) -> Iterator[str]:
    if source.type == "text":
        return _split_text(_read(file), source.text_separator)
    assert isinstance(file, Path), "only text is built in"
    if source.type == "jsonl":
        return _jsonl_documents(file, source.text_field)
    readers = {"parquet": parquet_documents, "arrow": arrow_documents}
    return readers[source.type](file, source.text_field)


def _read(file: Path | Traversable) -> str:
    data = file.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{str(file)!r} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}, "
            f"in line {line}. Convert it, for example with iconv."
        ) from None
    # As text files open everywhere: separators are written with \n.
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _split_text(text: str, separator: str) -> Iterator[str]:
    """Yields the documents between separators that are not blank, without newlines around them."""
    for document in text.split(separator) if separator else [text]:
        if document.strip():
            yield document.strip("\n")


def _jsonl_documents(file: Path, field: str) -> Iterator[str]:
    """Yields one document for each line of a JSONL file. Blank lines are skipped."""
    with file.open("rb") as lines:
        line_number = 0
        while line := lines.readline(MAX_JSON_BYTES + 1):
            line_number += 1
            where = f"{str(file)!r}, line {line_number},"
            if len(line) > MAX_JSON_BYTES:
                raise ValueError(
                    f"{where} has more than {MAX_JSON_BYTES:,} bytes. Give an object a line, each "
                    "of one document."
                )
            if line.strip():
                yield _document_in_line(line, field, where)


def _document_in_line(line: bytes, field: str, where: str) -> str:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8: byte 0x{line[error.start]:02x} at offset {error.start} of the "
            "line. Repair or remove it."
        ) from None
    try:
        values = parse_json(text, where)
    except ValueError as error:
        raise ValueError(f"{error} Repair or remove it.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{where} holds a {type(values).__name__}. Give an object a line.")
    if field not in values:
        raise ValueError(
            f"{where} has no field {field!r}: it has {short_list(values)}. Set "
            "`text_field` to the one that holds the text, or repair the line."
        )
    if not isinstance(values[field], str):
        raise ValueError(
            f"{where} has {shorten(json.dumps(values[field]), 40)} in {field!r}. Give a string."
        )
    return _check_surrogates(values[field], field, where)


def _check_surrogates(text: str, field: str, where: str) -> str:
    """Checks that a text has no lone surrogate, which JSON may escape and tokenizers refuse."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} has \\u{ord(text[error.start]):04x} in {field!r}, half of a surrogate pair, "
            f"at character {error.start + 1} of the text. Repair or remove it."
        ) from None
    return text
