"""Documents of any source: of text and JSONL files, and of columns of Parquet and Arrow files.

Arrow files are IPC files and streams; Feather is one of them.
"""

import json
from collections.abc import Callable, Iterator
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._input import MAX_JSON_BYTES, parse_json, short_list, shorten
from ._source_config import Source, resolve_files

if TYPE_CHECKING:
    import pyarrow


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
    readers = {"parquet": _parquet_documents, "arrow": _arrow_documents}
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


def _parquet_documents(file: Path, column: str) -> Iterator[str]:
    """Yields one document for each row of a Parquet file."""
    arrow = _pyarrow("parquet")
    from pyarrow import parquet

    def read() -> Iterator["pyarrow.RecordBatch"]:
        with parquet.ParquetFile(file) as opened:
            _check_column(opened.schema_arrow, column, file)
            yield from opened.iter_batches(columns=[column])

    return _documents(read, column, file, arrow)


def _arrow_documents(file: Path, column: str) -> Iterator[str]:
    """Yields one document for each row of an Arrow IPC file or stream."""
    arrow = _pyarrow("arrow")

    def read() -> Iterator["pyarrow.RecordBatch"]:
        with arrow.memory_map(str(file)) as opened:
            try:
                reader = arrow.ipc.open_file(opened)
            except arrow.ArrowInvalid:
                opened.seek(0)
                reader = arrow.ipc.open_stream(opened)
            _check_column(reader.schema, column, file)
            count = getattr(reader, "num_record_batches", None)
            yield from map(reader.get_batch, range(count)) if count is not None else reader

    return _documents(read, column, file, arrow)


def _documents(
    read: Callable[[], Iterator["pyarrow.RecordBatch"]], column: str, file: Path, arrow: Any
) -> Iterator[str]:
    row = 0
    try:
        for batch in read():
            for value in batch.column(column):
                row += 1
                yield _text_of_value(value, f"{str(file)!r}, row {row},", column)
    except (arrow.ArrowException, OSError) as error:
        what = shorten(str(error), 300)
        raise ValueError(f"{str(file)!r} cannot be read after row {row}: {what}") from None


def _text_of_value(value: Any, where: str, column: str) -> str:
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8: {error.reason}. Repair or remove it.") from None
    if text is None:
        raise ValueError(f"{where} has null in {column!r}. Give a string, or remove the row.")
    return text


def _check_column(schema: "pyarrow.Schema", column: str, file: Path) -> None:
    from pyarrow import types

    if column not in schema.names:
        raise ValueError(
            f"{str(file)!r} has no column {column!r}: it has "
            f"{short_list(schema.names)}. Set `text_field` to the one that "
            "holds the text."
        )
    column_type = schema.field(column).type
    inner = column_type.value_type if types.is_dictionary(column_type) else column_type
    if not (types.is_string(inner) or types.is_large_string(inner) or types.is_string_view(inner)):
        raise ValueError(
            f"{str(file)!r} has {column_type} in the column {column!r}. Set `text_field` to one of "
            "strings."
        )


def _pyarrow(kind: str) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ValueError(
            f"Data of the type {kind!r} needs pyarrow, which cannot be imported ({error}). "
            '`pip install "jaxpipe[data]"`.'
        ) from error
    return pyarrow
