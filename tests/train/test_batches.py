"""Which batches a config asks for."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpipe.cli import main
from jaxpipe.data import Batch, ByteTokenizer
from jaxpipe.train import Config, load_config, set_up
from jaxpipe.train._batches import make_batches, make_eval_batches
from jaxpipe.train._setup import Setup

TINY: dict[str, Any] = {
    "dataset_type": "text",
    "max_target_length": 64,
    "per_device_batch_size": 8.0,
    "enable_checkpointing": False,
}
TEXT: dict[str, Any] = {"type": "text", "files": "builtin:sonnets"}
MIXED: dict[str, Any] = {"data_sources": [TEXT]}


def setup_of(**settings: Any) -> Setup:
    return set_up(Config.model_validate(TINY | settings), jax.devices()[:1])


def texts(batch: Batch) -> str:
    return ByteTokenizer().decode(batch["tokens"][batch["segment_ids"] > 0])


def test_without_data_for_it_there_is_no_evaluation():
    assert make_eval_batches(setup_of()) is None
    assert make_eval_batches(setup_of(dataset_type="synthetic")) is None


def test_evaluation_reads_its_files_whole_and_in_order(tmp_path: Path):
    file = tmp_path / "eval.txt"
    file.write_text("\n\n\n".join(f"document {i}" for i in range(100)))
    setup = setup_of(eval_files=[str(file)])
    found = make_eval_batches(setup)
    assert found is not None
    tokens = sum(len(f"document {i}") + 1 for i in range(100))
    assert len(found) == -(-tokens // (64 * 8))
    assert "".join(map(texts, found)) == "".join(f"document {i}" for i in range(100))
    assert {name: values.shape for name, values in found[0].items()} == {
        name: values.shape for name, values in make_batches(setup)(0).items()
    }
    again = make_eval_batches(setup)
    assert again is not None
    np.testing.assert_array_equal(found[1]["tokens"], again[1]["tokens"])


def test_what_is_held_out_is_in_no_batch_of_training(tmp_path: Path):
    file = tmp_path / "all.txt"
    file.write_text("\n\n\n".join(f"<{i}>" for i in range(200)))
    settings = {"data_files": [str(file)], "eval_split_fraction": 0.2, "packing": False}
    setup = setup_of(**settings)
    batch_at, found = make_batches(setup), make_eval_batches(setup)
    assert found is not None
    held_out = set("".join(map(texts, found)).split(">")) - {""}
    epoch = "".join(texts(batch_at(step)) for step in range(25))
    trained = set(epoch.split(">")) - {""}
    assert held_out | trained == {f"<{i}" for i in range(200)}
    assert not held_out & trained
    other = make_eval_batches(setup_of(**settings, eval_split_seed=1))
    assert other is not None
    assert set("".join(map(texts, other)).split(">")) - {""} != held_out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset_type": "synthetic", "eval_files": "a"}, "'synthetic' and `eval_files` is"),
        ({"dataset_type": "synthetic", "eval_split_fraction": 0.1}, "and `eval_split_fraction` is"),
        ({"eval_files": "a", "eval_split_fraction": 0.1}, "0.1. Evaluation reads files of its own"),
        ({"eval_split_seed": 1}, "`eval_split_seed` is 1 and `eval_split_fraction` 0"),
        ({"eval_split_fraction": 1.0}, "less than 1"),
        ({"dataset_type": "jsonl", "text_separator": "x"}, "'jsonl' and `text_separator` is 'x'"),
        (
            {"text_field": "x"},
            "`text_field` is 'x', which it does not read. Leave it at 'text', or",
        ),
        ({"dataset_type": "tokens"}, "'tokens' and `token_eod` is not set"),
        ({"dataset_type": "tokens", "token_eod": 1, "tokenizer_path": "a"}, "`tokenizer_path` is"),
        ({"dataset_type": "mixture"}, "'mixture' and `data_sources` is empty. Give sources"),
        ({"dataset_type": "mixture", "data_files": "a"}, "'mixture' and `data_files` is"),
        (
            {"dataset_type": "mixture", **MIXED, "eval_data_sources": [TEXT | {"weight": 2.0}]},
            r"`eval_data_sources\[0\].weight` is 2, which nothing reads",
        ),
    ],
)
def test_settings_that_nothing_reads_or_that_say_two_things_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Config.model_validate(TINY | settings)


def test_files_of_evaluation_that_are_missing_are_named_with_their_key():
    with pytest.raises(ValueError, match="`eval_files` names 'no/file', which does not exist"):
        make_eval_batches(setup_of(eval_files="no/file"))


def test_a_run_on_written_tokens_has_the_batches_of_the_text(tmp_path: Path, capsys):
    file = tmp_path / "sonnets.bin"
    assert main(["tokenize", str(file), "dataset_type=text"]) == 0
    settings = capsys.readouterr().out.splitlines()[-1].split()
    assert settings[0] == "dataset_type=tokens"
    found = load_config([], [*settings, "max_target_length=64"], presets={"llama-tiny": {}})
    batch_at = make_batches(set_up(found, jax.devices()[:1]))
    for name, values in make_batches(setup_of())(7).items():
        np.testing.assert_array_equal(batch_at(7)[name], values)
    assert main(["tokenize", str(file), "dataset_type=text"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["tokenize", str(tmp_path / "b.bin")]) == 2
    assert "`dataset_type` is 'synthetic', and a file of tokens" in capsys.readouterr().err


def source(folder: Path, name: str, count: int, **fields: Any) -> dict[str, Any]:
    """A JSONL source whose documents are its name, each of one row without packing."""
    (folder / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n' * count)
    return {"type": "jsonl", "files": str(folder / f"{name}.jsonl"), **fields}


def names(batch: Batch) -> list[str]:
    return [ByteTokenizer().decode(row[row != 0]) for row in batch["tokens"]]


def test_a_mixture_has_rows_of_its_sources_by_weight(tmp_path: Path):
    sources = [source(tmp_path, "a", 3, weight=0.7), source(tmp_path, "b", 500, weight=0.3)]
    mixture: dict[str, Any] = {"dataset_type": "mixture", "packing": False}
    setup = setup_of(**mixture, data_sources=sources, per_device_batch_size=10.0)
    for step in (0, 1, 1000):
        assert sorted(names(make_batches(setup)(step))) == ["a"] * 7 + ["b"] * 3
    sources = [source(tmp_path, "a", 40, weight=2.0), source(tmp_path, "b", 20)]
    split = setup_of(**mixture, data_sources=sources, eval_split_fraction=0.5)
    found = make_eval_batches(split)
    assert found is not None
    held_out = [name for batch in found for name in names(batch) if name]
    assert held_out == sorted(held_out)
    assert 10 < held_out.count("a") < 30
    assert 3 < held_out.count("b") < 17
    apart = setup_of(**mixture, data_sources=sources, eval_data_sources=sources[1:])
    found = make_eval_batches(apart)
    assert found is not None
    assert [name for batch in found for name in names(batch)] == ["b"] * 20 + [""] * 4


def test_sources_whose_documents_end_differently_are_refused(tmp_path: Path):
    np.asarray([1, 0], np.uint16).tofile(tmp_path / "a.bin")
    binary = {"type": "tokens", "files": str(tmp_path / "a.bin"), "token_eod": 0}
    sources = [TEXT, binary]
    with pytest.raises(ValueError, match="Documents of `data_sources` end with the ids 0, 256"):
        make_batches(setup_of(dataset_type="mixture", data_sources=sources))


def test_a_file_of_a_mixture_that_is_missing_is_named_by_its_source():
    sources = [TEXT, {"type": "text", "files": "no/file"}]
    with pytest.raises(ValueError, match=r"`data_sources\[1\].files` names 'no/file'"):
        make_batches(setup_of(dataset_type="mixture", data_sources=sources))
