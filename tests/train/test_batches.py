"""Which batches a config asks for."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpipe.data import Batch, ByteTokenizer
from jaxpipe.train import Config, set_up
from jaxpipe.train._batches import make_batches, make_eval_batches
from jaxpipe.train._setup import Setup

TINY: dict[str, Any] = {
    "dataset_type": "text",
    "max_target_length": 64,
    "per_device_batch_size": 8.0,
    "enable_checkpointing": False,
}


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
    ],
)
def test_settings_of_evaluation_that_say_nothing_or_two_things_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Config.model_validate(TINY | settings)


def test_files_of_evaluation_that_are_missing_are_named_with_their_key():
    with pytest.raises(ValueError, match="`eval_files` names 'no/file', which does not exist"):
        make_eval_batches(setup_of(eval_files="no/file"))
