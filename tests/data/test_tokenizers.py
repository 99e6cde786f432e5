import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.data import ByteTokenizer, Tokenizer, load_tokenizer


@pytest.fixture
def words(tmp_path: Path):
    """Writes a word-level tokenizer.json with the given ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    def write(vocabulary: dict[str, int]) -> str:
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore
        path = tmp_path / "tokenizer.json"
        tokenizer.save(str(path))
        return str(path)

    return write


@given(st.text())
def test_bytes_decode_to_the_text_they_encode(text: str):
    ids = ByteTokenizer().encode(text)
    assert ids.dtype == np.int32
    assert ByteTokenizer().decode(ids) == text


def test_bytes_show_what_is_no_text():
    assert ByteTokenizer().decode([104, 105, 256, 300, 0xC3]) == "hi\ufffd\ufffd"


def test_bytes_need_257_rows_of_the_embedding():
    assert load_tokenizer("", vocab_size=257) == ByteTokenizer()
    with pytest.raises(
        ValueError, match="`vocab_size` is 256 and the tokenizer 'of bytes' has 257"
    ):
        load_tokenizer("", vocab_size=256)


def test_a_hugging_face_file_is_a_tokenizer(words):
    path = words({"[UNK]": 0, "to": 1, "be": 2, "</s>": 9})
    tokenizer = load_tokenizer(path, vocab_size=10)
    assert isinstance(tokenizer, Tokenizer)
    assert (tokenizer.eod, tokenizer.vocab_size) == (9, 10)
    np.testing.assert_array_equal(tokenizer.encode("to be or"), [1, 2, 0])
    assert tokenizer.decode(np.asarray([1, 2], np.int32)) == "to be"
    with pytest.raises(ValueError, match=r"has 10 ids\. Make `vocab_size` at least 10"):
        load_tokenizer(path, vocab_size=9)


def test_a_tokenizer_without_an_end_of_document_is_refused(words):
    path = words({"[UNK]": 0})
    with pytest.raises(
        ValueError, match=r"no token that ends a document\. Add one of <\|endoftext"
    ):
        load_tokenizer(path, vocab_size=10)


def test_a_path_that_is_no_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"`tokenizer_path` is .*none.json', which is not a file"):
        load_tokenizer(str(tmp_path / "none.json"), vocab_size=10)
    (tmp_path / "other.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(ValueError, match=r"other.json', which is not a tokenizer.json"):
        load_tokenizer(str(tmp_path / "other.json"), vocab_size=10)
