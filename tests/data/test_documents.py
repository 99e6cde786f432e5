import tracemalloc
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

from jaxpipe.data import Source, read_documents
from jaxpipe.data.batches import (
    corpus_fingerprint,
    corpus_from_tokens,
    read_corpus,
    tokenize,
)
from jaxpipe.data.sources import ByteTokenizer

BLANKS = "\n\n\n"


def read(*paths: Path | str, separator: str = BLANKS) -> list[str]:
    files = tuple(map(str, paths))
    return list(read_documents(Source(type="text", files=files, text_separator=separator)))


def test_the_sonnets_ship_with_the_package():
    sonnets = read("builtin:sonnets")
    assert len(sonnets) >= 60
    assert sum(map(len, sonnets)) > 36_000
    assert all(sonnet.isascii() and sonnet.count("\n") == 13 for sonnet in sonnets)
    assert "Shall I compare thee to a summer's day?" in {s.split("\n")[0] for s in sonnets}


def test_a_file_is_split_at_the_separator_and_blank_pieces_are_none(tmp_path: Path):
    file = tmp_path / "a.txt"
    file.write_text("\n\none\ntwo\n\n\n\n\n\n\n  \n\n\n three\n")
    assert read(file) == ["one\ntwo", " three"]
    assert read(file, separator="") == ["one\ntwo\n\n\n\n\n\n\n  \n\n\n three"]


def test_files_of_other_systems_read_the_same(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\n\r\ntwo\r\n")
    assert read(tmp_path / "a.txt") == ["one", "two"]


def test_a_folder_gives_its_text_files_at_any_depth_in_sorted_order(tmp_path: Path):
    (tmp_path / "b").mkdir()
    for name in ("c.txt", "b/z.txt", "a.txt", "not.md"):
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == ["a.txt", "b/z.txt", "c.txt"]
    assert read(tmp_path / "not.md", tmp_path / "a.txt") == ["not.md", "a.txt"]


def test_a_path_without_text_is_named(tmp_path: Path):
    (tmp_path / "blank.txt").write_text("\n \n")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"names .*none.txt', which does not exist"):
        read(tmp_path / "none.txt")
    with pytest.raises(ValueError, match=r"names .*blank.txt', which holds no document"):
        read("builtin:sonnets", tmp_path / "blank.txt")
    with pytest.raises(ValueError, match=r"names .*folder', a folder without \*.txt files"):
        read(tmp_path / "folder")


def test_an_unknown_builtin_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'builtin:plays'. Built in: builtin:sonnets\."):
        read("builtin:plays")


def test_a_file_that_is_not_utf_8_is_named_with_the_offset(tmp_path: Path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"latin.txt' is not UTF-8: byte 0xe9 at offset 3"):
        read(tmp_path)


def test_every_document_ends_with_the_end_of_document():
    corpus = tokenize(["hi", "", "you"], ByteTokenizer())
    np.testing.assert_array_equal(corpus.ends, [3, 4, 8])
    np.testing.assert_array_equal(corpus.starts(np.arange(3)), [0, 3, 4])
    np.testing.assert_array_equal(corpus.tokens, [104, 105, 256, 256, 121, 111, 117, 256])


def test_the_checksum_of_a_corpus_is_that_of_its_bytes_and_copies_none_of_them():
    tokens, ends = np.arange(1 << 20, dtype=np.int32), np.asarray([1 << 20])
    of_ends = crc32(ends.tobytes(), crc32(tokens.tobytes()))
    tracemalloc.start()
    found = corpus_fingerprint(corpus_from_tokens(tokens, ends))["checksum"]
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == crc32(bytes(8), of_ends)
    assert peak_bytes < tokens.nbytes / 10
    assert (
        corpus_fingerprint(corpus_from_tokens(np.repeat(tokens, 2)[::2], ends))["checksum"] == found
    )


def test_documents_without_a_target_are_refused(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 3)
    source, tokenizer = Source(type="jsonl", files=(str(tmp_path),)), ByteTokenizer()
    with pytest.raises(ValueError, match="The 3 documents of `data_files` are all empty"):
        read_corpus(source, tokenizer, vocab_size=264)
    (tmp_path / "b.jsonl").write_text('{"text": "a"}')
    assert len(read_corpus(source, tokenizer, vocab_size=264)) == 5
