import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.data import Source, load_tokenizer, read_documents
from jaxpipe.data.batches import tokenize
from jaxpipe.data.sources import ByteTokenizer, SentencePieceTokenizer, Tokenizer


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
    assert tokenizer.ids.tolist() == [0, 1, 2, 9]
    np.testing.assert_array_equal(tokenizer.encode("to be or"), [1, 2, 0])
    assert tokenizer.decode(np.asarray([1, 2], np.int32)) == "to be"
    with pytest.raises(ValueError, match=r"has 10 ids\. Make `vocab_size` at least 10"):
        load_tokenizer(path, vocab_size=9)


def test_a_document_is_neither_cut_nor_filled_whatever_the_file_says(words):
    from tokenizers import Tokenizer

    path = words({"[UNK]": 0, "to": 1, "be": 2, "</s>": 3})
    fitted = Tokenizer.from_file(path)
    fitted.enable_truncation(3)
    fitted.enable_padding(length=3, pad_id=0)
    fitted.save(path)
    assert [len(Tokenizer.from_file(path).encode(text).ids) for text in ("to", "to " * 5)] == [3, 3]
    tokenizer = load_tokenizer(path, vocab_size=4)
    np.testing.assert_array_equal(tokenizer.encode("to"), [1])
    np.testing.assert_array_equal(tokenizer.encode("to be to be to"), [1, 2, 1, 2, 1])


@pytest.mark.parametrize("is_special", [True, False])
def test_special_tokens_in_a_document_are_text(is_special: bool, tmp_path: Path):
    from tokenizers import AddedToken, Tokenizer, models

    letters = {letter: i for i, letter in enumerate(sorted(set("a<|endoftext|>")))}
    written = Tokenizer(models.BPE(letters, []))
    written.add_tokens([AddedToken("<|endoftext|>", special=is_special), "aa"])
    path = str(tmp_path / "tokenizer.json")
    written.save(path)
    assert written.encode("a<|endoftext|>").ids == [letters["a"], len(letters)]
    tokenizer = load_tokenizer(path, vocab_size=20)
    assert (tokenizer.eod, tokenizer.vocab_size) == (len(letters), len(letters) + 2)
    spelled = [letters[letter] for letter in "a<|endoftext|>"]
    np.testing.assert_array_equal(tokenizer.encode("a<|endoftext|>"), spelled)
    # Added tokens that are no special ones stay tokens.
    np.testing.assert_array_equal(tokenizer.encode("aa"), [len(letters) + 1])


def test_a_special_token_ends_a_document_before_one_that_is_none(tmp_path: Path):
    """Gemma's tokenizers have `</s>` as a tag of HTML, in front of names in our list."""
    from tokenizers import AddedToken, Tokenizer, models

    written = Tokenizer(models.BPE({"a": 0}, []))
    written.add_tokens([AddedToken("</s>", special=False)])
    written.add_special_tokens(["<eos>"])
    written.save(path := str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(path, vocab_size=20).eod == 2


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


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """Trains a sentencepiece model of the sonnets."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("pieces")
    sonnets = list(read_documents(Source(type="text", files=("builtin:sonnets",))))

    def train(name: str, **options: Any) -> str:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sonnets),
            model_prefix=str(folder / name),
            vocab_size=300,
            model_type="bpe",
            num_threads=1,
            minloglevel=2,
            **options,
        )
        return str(folder / f"{name}.model")

    return train


def test_a_model_of_sentencepiece_is_a_tokenizer(pieces):
    path = pieces("usual")
    tokenizer = load_tokenizer(path, vocab_size=300)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert isinstance(tokenizer, Tokenizer)
    assert (tokenizer.vocab_size, tokenizer.eod) == (300, 2)
    line = "Shall I compare thee to a summer's day?"
    ids = tokenizer.encode(line)
    assert ids.dtype == np.int32
    assert 3 <= ids.min() <= ids.max() < 300
    assert len(ids) < len(line)
    assert tokenizer.decode([*ids.tolist(), tokenizer.eod, 310]) == line
    assert len(tokenizer.encode("")) == 0
    assert not {1, 2} & set(tokenizer.encode("a <s> b </s>").tolist()), "control symbols are text"
    corpus = tokenize([line, line], tokenizer)
    np.testing.assert_array_equal(corpus.ends, [len(ids) + 1, 2 * len(ids) + 2])
    with pytest.raises(ValueError, match=r"has 300 ids\. Make `vocab_size` at least 300"):
        load_tokenizer(path, vocab_size=299)


def test_a_model_of_sentencepiece_that_cannot_be_used_is_refused(pieces, tmp_path: Path):
    with pytest.raises(ValueError, match=r"endless.model', which has no token that ends a sente"):
        load_tokenizer(pieces("endless", eos_id=-1), vocab_size=300)
    (tmp_path / "other.model").write_text("no model")
    with pytest.raises(ValueError, match=r"other.model', which is not a model of sentencepiece"):
        load_tokenizer(str(tmp_path / "other.model"), vocab_size=300)
    with pytest.raises(ValueError, match=r"none.model', which is not a file"):
        load_tokenizer(str(tmp_path / "none.model"), vocab_size=300)
