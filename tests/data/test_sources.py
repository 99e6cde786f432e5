"""What every kind of file holds, and what is said of files that do not hold it."""

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from jaxpipe.data import Source, read_documents, write_tokens
from jaxpipe.data.batches import check_files, read_corpus
from jaxpipe.data.sources import ByteTokenizer, DiskError, LostFileError

TEXTS = ["one", "", "zwölf\n\n\n", "x" * 1000]


def jsonl(file: Path, texts: list[Any], field: str) -> None:
    lines = (json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts))
    file.write_text("\n".join(lines))  # with blank lines between them


def table(texts: list[Any], field: str) -> pa.Table:
    column = texts if len(texts) else pa.array([], pa.string())
    return pa.table({"id": list(range(len(texts))), field: column})


def write_parquet(file: Path, texts: list[Any], field: str) -> None:
    parquet.write_table(table(texts, field), file, row_group_size=2)


def write_feather(file: Path, texts: list[Any], field: str) -> None:
    feather.write_feather(table(texts, field), str(file))


def write_stream(file: Path, texts: list[Any], field: str) -> None:
    found = table(texts, field)
    with pa.OSFile(str(file), "wb") as out, pa.ipc.new_stream(out, found.schema) as writer:
        writer.write_table(found, max_chunksize=2)


WRITERS: dict[str, tuple[Any, Callable[[Path, list[Any], str], None]]] = {
    "a.jsonl": ("jsonl", jsonl),
    "a.parquet": ("parquet", write_parquet),
    "a.feather": ("arrow", write_feather),
    "a.arrow": ("arrow", write_stream),
}


def read(kind: Any, *files: Path, **fields: Any) -> list[str]:
    return list(read_documents(Source(type=kind, files=tuple(map(str, files)), **fields)))


@pytest.mark.parametrize("name", WRITERS)
def test_a_document_a_line_or_row(name: str, tmp_path: Path):
    kind, write = WRITERS[name]
    write(tmp_path / name, TEXTS, "text")
    (tmp_path / "other.txt").write_text("not this one")
    assert read(kind, tmp_path / name) == read(kind, tmp_path) == TEXTS
    write(tmp_path / name, TEXTS, "body")
    assert read(kind, tmp_path / name, text_field="body") == TEXTS
    with pytest.raises(ValueError, match=rf"{name}'.* has no (field|column) 'text': it has 'id', "):
        read(kind, tmp_path / name)


@pytest.mark.parametrize("name", WRITERS)
def test_a_line_or_row_without_text_is_named(name: str, tmp_path: Path):
    kind, write = WRITERS[name]
    write(tmp_path / name, ["a", None, "b"], "text")
    # Blank lines count.
    with pytest.raises(ValueError, match=rf"{name}', (line 3|row 2), has null in 'text'"):
        read(kind, tmp_path / name)
    write(tmp_path / name, [1, 2], "text")
    with pytest.raises(ValueError, match=rf"{name}'.* has (1|int64) in .*'text'"):
        read(kind, tmp_path / name)
    write(tmp_path / name, [], "text")
    with pytest.raises(ValueError, match=r"`data_files` names .*which holds no document"):
        read(kind, tmp_path / name)


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_of_another_kind_is_refused(name: str, tmp_path: Path):
    (tmp_path / name).write_text("Shall I compare thee to a summer's day?")
    with pytest.raises(ValueError, match=rf"{name}', line 1, is not JSON|{name}' cannot be read"):
        read(WRITERS[name][0], tmp_path / name)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "caf\xe9"}', "is not UTF-8: byte 0xe9 at offset 13 of the line"),
        (b'{"text": "cut off', "is not JSON: Invalid control character at character 18"),
        (b'["text"]', "holds a list. Give an object a line"),
        (
            rb'{"text": "ab\ud83d"}',
            r"has \\ud83d in 'text', half of a .* at character 3 of the text",
        ),
        (b'{"text": ["a"]}', r"has \[\"a\"\] in 'text'. Give a string"),
    ],
)
def test_a_broken_line_in_the_middle_of_jsonl_is_named(line: bytes, message: str, tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "b"}\n' + line + b'\n{"text": ""}')
    with pytest.raises(ValueError, match=rf"a.jsonl', line 3, {message}"):
        read("jsonl", tmp_path / "a.jsonl")


def test_a_row_that_is_not_utf_8_is_named(tmp_path: Path):
    broken = pa.Array.from_buffers(
        pa.string(),
        2,
        [None, pa.py_buffer(np.asarray([0, 1, 3], np.int32)), pa.py_buffer(b"a\xe9\xe9")],
    )
    write_feather(tmp_path / "a.feather", broken, "text")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"a.feather', row 2, is not UTF-8"):
        read("arrow", tmp_path / "a.feather")


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "arrow", "tokens"])
def test_a_file_that_vanishes_while_files_are_read_is_named(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "jaxpipe.data.sources._documents.resolve_files", lambda *_, **__: [tmp_path / "gone"]
    )
    monkeypatch.setattr(
        "jaxpipe.data.sources._token_files.resolve_files", lambda *_, **__: [tmp_path / "gone"]
    )
    with pytest.raises(ValueError, match=r"gone'.* cannot be read.*: .*No such file"):
        read(kind, tmp_path) if kind != "tokens" else tokens(tmp_path)


def test_text_that_ships_with_the_package_is_no_other_kind():
    with pytest.raises(ValueError, match="names 'builtin:sonnets', which is text, not jsonl"):
        read("jsonl", Path("builtin:sonnets"))


IDS = [5, 6, 0, 7, 0, 0, 8]
"""Documents end with 0; the last one does not."""


def tokens(*files: Path, vocab_size: int = 10, **fields: Any):
    source = Source(type="tokens", files=tuple(map(str, files)), token_eod=0, **fields)
    return read_corpus(source, None, vocab_size=vocab_size)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("ending", ["bin", "npy"])
def test_tokens_are_mapped_and_read_as_they_lie_in_files(ending, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxpipe.data.sources._token_files.CHUNK_TOKENS", 3)
    ids, file = np.asarray(IDS, dtype), tmp_path / f"a.{ending}"
    ids.tofile(file) if ending == "bin" else np.save(file, ids)
    corpus = tokens(file, tmp_path, **({"token_dtype": dtype} if ending == "bin" else {}))
    np.testing.assert_array_equal(corpus.ends, [3, 5, 6, 7, 10, 12, 13, 14])
    np.testing.assert_array_equal(corpus.ids(np.arange(14)), IDS + IDS)
    np.testing.assert_array_equal(corpus.ids(np.asarray([13, 0, 7, 6])), [8, 5, 5, 8])
    assert not isinstance(corpus.tokens, np.ndarray)
    assert all(isinstance(file.tokens, np.memmap) for file in corpus.tokens.files)


def test_a_token_that_the_model_has_no_row_for_is_named_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxpipe.data.sources._token_files.CHUNK_TOKENS", 3)
    np.asarray(IDS, np.uint16).tofile(tmp_path / "a.bin")
    assert len(tokens(tmp_path, vocab_size=9)) == 7
    with pytest.raises(ValueError, match=r"a.bin' has the id 8 at token 6, and `vocab_size` is 8"):
        tokens(tmp_path, vocab_size=8)
    with pytest.raises(ValueError, match=r"a.bin' has the id 5 at token 0"):
        tokens(tmp_path, vocab_size=5)


def test_an_end_of_document_that_cannot_be_right_is_refused(tmp_path: Path):
    for name, ids in {"a.bin": [5, 6], "b.bin": [7, 0, 8]}.items():
        np.asarray(ids, np.uint16).tofile(tmp_path / name)
    np.testing.assert_array_equal(tokens(tmp_path).ends, [2, 4, 5])
    with pytest.raises(ValueError, match=r"`token_eod` is 0, which .*a.bin' does not hold, nor"):
        tokens(tmp_path / "a.bin")
    source = Source(type="tokens", files=(str(tmp_path),), token_eod=10)
    with pytest.raises(ValueError, match=r"`token_eod` is 10 and `vocab_size` is 10, .* least 11,"):
        read_corpus(source, None, vocab_size=10)


def test_files_that_hold_no_flat_ids_are_refused(tmp_path: Path):
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "text.npy").write_text("hello")
    np.save(tmp_path / "square.npy", np.zeros((2, 2), np.int32))
    np.save(tmp_path / "floats.npy", np.zeros(2))
    for name, message in {
        "odd.bin": "has 3 bytes, which are no whole number of uint16",
        "empty.bin": "holds no token",
        "text.npy": "is not an .npy file",
        "square.npy": r"holds int32\[2, 2\]. Give a flat array",
        "floats.npy": r"holds float64\[2\]",
        "none.bin": "does not exist",
    }.items():
        with pytest.raises(ValueError, match=f"{name}'.* {message}"):
            tokens(tmp_path / name)


def test_a_file_that_vanishes_or_shrinks_later_is_named(tmp_path: Path):
    file = tmp_path / "a.bin"
    np.asarray(IDS, np.uint16).tofile(file)
    corpus = tokens(file)
    with file.open("r+b") as opened:
        opened.truncate(4)
    with pytest.raises(LostFileError, match=r"a.bin' had 14 bytes when the run began, and has 4"):
        corpus.ids(np.arange(2))
    file.unlink()
    with pytest.raises(LostFileError, match=r"a.bin' was there when the run began, and cannot be"):
        corpus.ids(np.arange(2))


@pytest.mark.parametrize("how", ["in place", "by another file"])
def test_other_ids_in_a_file_of_the_same_size_are_found(tmp_path: Path, how: str):
    file, other = tmp_path / "a.bin", tmp_path / "b.bin"
    np.asarray(IDS, np.uint16).tofile(file)
    corpus = tokens(file)
    check_files([corpus])
    written, status = file.read_bytes(), file.stat()
    file.write_bytes(written)
    check_files([corpus])  # the same ids
    other.write_bytes(written[::-1])
    shutil.copyfile(other, file) if how == "in place" else other.rename(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size
    with pytest.raises(LostFileError, match=r"a.bin' had other ids when the run began"):
        check_files([corpus])


def test_tokens_of_text_are_those_of_the_text(tmp_path: Path):
    source = Source(type="text", files=("builtin:sonnets",))
    written = write_tokens(tmp_path / "a.bin", read_documents(source), ByteTokenizer())
    text = read_corpus(source, ByteTokenizer(), vocab_size=257)
    files = (str(tmp_path / "a.bin"),)
    again = read_corpus(
        Source(type="tokens", files=files, token_dtype="uint16", token_eod=256),
        None,
        vocab_size=257,
    )
    assert (written.num_tokens, written.num_documents) == (len(text), len(text.ends))
    assert (written.token_dtype, written.token_eod) == ("uint16", 256)
    np.testing.assert_array_equal(again.ends, text.ends)
    everywhere = np.arange(len(text))
    np.testing.assert_array_equal(again.ids(everywhere), text.ids(everywhere))
    with pytest.raises(ValueError, match=r"a.bin' is there already"):
        write_tokens(tmp_path / "a.bin", read_documents(source), ByteTokenizer())
    with pytest.raises(ValueError, match=r"a.npy' does not end with .bin"):
        write_tokens(tmp_path / "a.npy", read_documents(source), ByteTokenizer())


def test_a_file_of_tokens_that_another_command_writes_is_left_alone(tmp_path: Path):
    partial = tmp_path / "a.bin.partial"
    partial.write_bytes(b"theirs")
    with pytest.raises(ValueError, match=r"a.bin.partial' is there: another command is writing it"):
        write_tokens(tmp_path / "a.bin", ["a"], ByteTokenizer())
    assert [file.name for file in tmp_path.iterdir()] == [partial.name]
    assert partial.read_bytes() == b"theirs"


@pytest.mark.parametrize("document", ["short", "long" * 10_000])
def test_a_file_of_tokens_that_cannot_be_written_leaves_nothing(document: str, tmp_path: Path):
    with pytest.raises(ValueError, match=r"none/a.bin' cannot be written: No such file"):
        write_tokens(tmp_path / "none" / "a.bin", [document], ByteTokenizer())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, limits[1]))  # as a full disk
    try:
        with pytest.raises(DiskError, match=r"a.bin' cannot be written: File too large\. Choose"):
            write_tokens(tmp_path / "a.bin", [document], ByteTokenizer())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_a_broken_document_leaves_no_part_of_a_file_of_tokens(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "cut')
    source = Source(type="jsonl", files=(str(tmp_path / "a.jsonl"),))
    with pytest.raises(ValueError, match="line 2, is not JSON"):
        write_tokens(tmp_path / "a.bin", read_documents(source), ByteTokenizer())
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]
