"""Columns of Parquet files, and of Arrow's IPC files and streams (Feather is one), as documents."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._input import short_list, shorten

if TYPE_CHECKING:
    import pyarrow


def parquet_documents(file: Path, column: str) -> Iterator[str]:
    """Yields one document for each row of a Parquet file."""
    arrow = _pyarrow("parquet")
    from pyarrow import parquet

    def read() -> Iterator["pyarrow.RecordBatch"]:
        with parquet.ParquetFile(file) as opened:
            _check_column(opened.schema_arrow, column, file)
            yield from opened.iter_batches(columns=[column])

    return _documents(read, column, file, arrow)


def arrow_documents(file: Path, column: str) -> Iterator[str]:
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
