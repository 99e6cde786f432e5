"""Which batches a config asks for."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxpipe.cli import main
from jaxpipe.data import Source
from jaxpipe.data.batches import Batch
from jaxpipe.data.sources import ByteTokenizer
from jaxpipe.train import Config, load_config, set_up
from jaxpipe.train.loop import data_changes, tokenizer_checksum
from jaxpipe.train.plan import Setup
from jaxpipe.train.step import shard_batch_of_step

from .runs import data_of

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
    assert data_of(setup_of(eval_interval=1)).evaluation is None
    assert data_of(setup_of(eval_split_fraction=0.1)).evaluation is None
    assert data_of(setup_of(dataset_type="synthetic")).evaluation is None


def test_evaluation_reads_its_files_whole_and_in_order(tmp_path: Path):
    file = tmp_path / "eval.txt"
    file.write_text("\n\n\n".join(f"document {i}" for i in range(100)))
    setup = setup_of(eval_files=[str(file)], eval_interval=1)
    found = data_of(setup).evaluation
    assert found is not None
    tokens = sum(len(f"document {i}") + 1 for i in range(100))
    assert len(found) == -(-tokens // (64 * 8))
    assert "".join(map(texts, found)) == "".join(f"document {i}" for i in range(100))
    assert {name: values.shape for name, values in found[0].items()} == {
        name: values.shape for name, values in data_of(setup).training(0).items()
    }
    again = data_of(setup).evaluation
    assert again is not None
    np.testing.assert_array_equal(found[1]["tokens"], again[1]["tokens"])


def test_what_is_held_out_is_in_no_batch_of_training(tmp_path: Path):
    file = tmp_path / "all.txt"
    file.write_text("\n\n\n".join(f"<{i}>" for i in range(200)))
    settings = {"data_files": [str(file)], "eval_split_fraction": 0.2, "packing": False}
    settings |= {"eval_interval": 1}
    setup = setup_of(**settings)
    batch_at, found = data_of(setup).training, data_of(setup).evaluation
    assert found is not None
    held_out = set("".join(map(texts, found)).split(">")) - {""}
    epoch = "".join(texts(batch_at(step)) for step in range(25))
    trained = set(epoch.split(">")) - {""}
    assert held_out | trained == {f"<{i}" for i in range(200)}
    assert not held_out & trained
    other = data_of(setup_of(**settings, eval_split_seed=1)).evaluation
    assert other is not None
    assert set("".join(map(texts, other)).split(">")) - {""} != held_out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset_type": "synthetic", "eval_files": "a"}, "'synthetic' and `eval_files` is"),
        ({"dataset_type": "synthetic", "eval_split_fraction": 0.1}, "and `eval_split_fraction` is"),
        ({"eval_files": "a", "eval_split_fraction": 0.1}, "0.1. Evaluation reads files of its own"),
        ({"eval_split_seed": 1}, "`eval_split_seed` is 1 and `eval_split_fraction` is 0"),
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


def test_one_document_is_not_split_and_the_error_says_what_makes_more_of_it(tmp_path: Path):
    file = tmp_path / "novel.txt"
    file.write_text("\n\n".join(f"paragraph {i}" for i in range(100)))
    settings = {"data_files": str(file), "eval_split_fraction": 0.1, "eval_interval": 1}
    with pytest.raises(
        ValueError, match=r"of 1 documents.* `text_separator` is '\\n\\n\\n'\. Give"
    ):
        data_of(setup_of(**settings))
    with pytest.raises(ValueError, match=r"and \\n\\n is one of backslashes .* in double quotes"):
        Config.model_validate(TINY | settings | {"text_separator": r"\n\n"})
    assert data_of(setup_of(**settings, text_separator="\n\n")).evaluation is not None


def test_files_of_evaluation_that_are_missing_are_named_with_their_key():
    with pytest.raises(ValueError, match="`eval_files` names 'no/file', which does not exist"):
        data_of(setup_of(eval_files="no/file", eval_interval=1))


def test_a_run_on_written_tokens_has_the_batches_of_the_text(tmp_path: Path, capsys):
    file = tmp_path / "sonnets.bin"
    assert main(["tokenize", str(file), "dataset_type=text"]) == 0
    settings = capsys.readouterr().out.splitlines()[-1].split()
    assert settings[0] == "dataset_type=tokens"
    found = load_config([], [*settings, "max_target_length=64"], presets={"llama-tiny": {}})
    batch_at = data_of(set_up(found, jax.devices()[:1])).training
    for name, values in data_of(setup_of()).training(7).items():
        np.testing.assert_array_equal(batch_at(7)[name], values)
    assert main(["tokenize", str(file), "dataset_type=text"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["tokenize", str(tmp_path / "b.bin")]) == 2
    assert "`dataset_type` is 'synthetic', and a file of tokens" in capsys.readouterr().err
    settings = ["dataset_type=text", "eval_interval=1", "eval_split_fraction=0.1"]
    assert main(["tokenize", str(tmp_path / "b.bin"), *settings]) == 2
    assert "`eval_split_fraction` says what a run is evaluated on" in capsys.readouterr().err


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
        assert sorted(names(data_of(setup).training(step))) == ["a"] * 7 + ["b"] * 3
    sources = [source(tmp_path, "a", 40, weight=2.0), source(tmp_path, "b", 20)]
    split = setup_of(**mixture, data_sources=sources, eval_split_fraction=0.5, eval_interval=1)
    found = data_of(split).evaluation
    assert found is not None
    held_out = [name for batch in found for name in names(batch) if name]
    assert held_out == sorted(held_out)
    assert 10 < held_out.count("a") < 30
    assert 3 < held_out.count("b") < 17
    evaluation = {"eval_data_sources": sources[1:], "eval_interval": 1}
    apart = setup_of(**mixture, data_sources=sources, **evaluation)
    found = data_of(apart).evaluation
    assert found is not None
    assert [name for batch in found for name in names(batch)] == ["b"] * 20 + [""] * 4


def test_sources_whose_documents_end_differently_are_refused(tmp_path: Path):
    np.asarray([1, 0], np.uint16).tofile(tmp_path / "a.bin")
    binary = {"type": "tokens", "files": str(tmp_path / "a.bin"), "token_eod": 0}
    sources = [TEXT, binary]
    with pytest.raises(ValueError, match="Documents of `data_sources` end with the ids 0, 256"):
        data_of(setup_of(dataset_type="mixture", data_sources=sources))


def test_a_file_of_a_mixture_that_is_missing_is_named_by_its_source():
    sources = [TEXT, {"type": "text", "files": "no/file"}]
    with pytest.raises(ValueError, match=r"`data_sources\[1\].files` names 'no/file'"):
        data_of(setup_of(dataset_type="mixture", data_sources=sources))


def test_a_run_whose_file_vanishes_ends_with_its_name(tmp_path: Path, capsys, monkeypatch):
    file = tmp_path / "a.bin"
    (np.arange(4000) % 300).astype(np.uint16).tofile(file)

    settings = f"""dataset_type=tokens token_eod=0 data_files={file} output_dir={tmp_path}
        base_emb_dim=16 base_num_decoder_layers=2 base_mlp_dim=32 max_target_length=16 dtype=float32
        enable_tensorboard=false enable_checkpointing=false ici_pipeline_parallelism=2
        per_device_batch_size=1 steps=5"""
    monkeypatch.setattr(
        "jaxpipe.train.loop._loop.first_state", lambda *_, **__: {"gone": file.unlink()}
    )
    assert main(["train", *settings.split()]) == 1
    assert f"{str(file)!r} was there when the run began, and cannot be" in capsys.readouterr().err


def decided_by(tmp_path: Path, text: str = "a b", **settings: Any) -> dict[str, Any]:
    """As a checkpoint gives it back."""
    file = tmp_path / "text.txt"
    file.write_text(text)
    found = data_of(setup_of(data_files=str(file), **settings)).training.decided_by
    return json.loads(json.dumps(found))


def test_changed_data_is_told_by_what_has_changed(tmp_path: Path):
    before = decided_by(tmp_path)
    assert data_changes(before, decided_by(tmp_path)) == []
    for now, changes in {
        "`max_target_length` was 64 and is 32": decided_by(tmp_path, max_target_length=32),
        "the number of rows in a batch was 8 and is 4": decided_by(
            tmp_path, per_device_batch_size=4.0
        ),
        "`data_shuffle_seed` was 0 and is 1": decided_by(tmp_path, data_shuffle_seed=1),
        r"`data_shuffle_seed` was 0 and is none \(not shuffled\)": decided_by(
            tmp_path, enable_data_shuffling=False
        ),
        "`packing` was True and is False": decided_by(tmp_path, packing=False),
        r"`checksum` of source 0 was \d+ and is \d+": decided_by(tmp_path, "b a"),
        r"`tokens` of source 0 was 4 and is 5; `.*": decided_by(tmp_path, "b aa"),
    }.items():
        assert re.fullmatch(now, "; ".join(data_changes(before, changes)))
    other = data_of(setup_of(dataset_type="synthetic", max_target_length=32)).training.decided_by
    assert data_changes(before, other) == [
        "`dataset_type` was for files and is for random tokens",
        "`max_target_length` was 64 and is 32",
    ]
    (tmp_path / "tokenizer.json").write_text("another")
    path = str(tmp_path / "tokenizer.json")
    tokenizer = tokenizer_checksum(path, [Source(type="text", files=("a",))])
    (change,) = data_changes(before, before | tokenizer)
    assert re.fullmatch(r"the tokenizer was bytes and is \d+", change)


def test_the_same_tokens_in_a_file_are_the_same_data(tmp_path: Path):
    before = decided_by(tmp_path)
    for dtype in ("uint16", "int64"):
        np.asarray([*b"a b", 256], dtype).tofile(tmp_path / "a.bin")
        settings = {"dataset_type": "tokens", "token_dtype": dtype, "token_eod": 256}
        found = data_of(setup_of(data_files=str(tmp_path / "a.bin"), **settings)).training
        assert data_changes(before, found.decided_by) == []


def test_a_run_with_other_data_is_refused_unless_the_user_allows_it(
    tmp_path: Path, capsys, monkeypatch
):
    def one_step(plan, loop, state, done, batch_at, *, save, **_):
        yield done + 1, {"loss": 1.0, "gradient_norm": 1.0}
        save(done + 1, state, {})

    monkeypatch.setattr("jaxpipe.train.loop._loop.run_steps", one_step)
    settings = f"""output_dir={tmp_path} base_emb_dim=16 base_num_decoder_layers=1
        base_mlp_dim=32 learning_rate_schedule_steps=9
        max_target_length=16 dtype=float32 enable_tensorboard=false per_device_batch_size=1
        pipeline_engine=none dataset_type=text"""

    def run(*words: str) -> str:
        assert main(["train", *settings.split(), *words]) == 0
        return capsys.readouterr().out

    assert "warning" not in run("steps=1")
    assert (
        main(["train", *settings.split(), "steps=2", "packing=false", "data_shuffle_seed=5"]) == 2
    )
    refused = capsys.readouterr().err
    assert "`packing` was True and is False; `data_shuffle_seed` was 0 and is 5. Some" in refused
    assert "`allow_data_change=true`" in refused
    said = run("steps=2", "data_shuffle_seed=5", "allow_data_change=true")
    assert "warning: The data is not that of the checkpoint: `data_shuffle_seed` was 0" in said


def test_no_checkpoint_is_taken_of_steps_on_tokens_that_were_overwritten(
    tmp_path: Path, capsys, monkeypatch
):
    file = tmp_path / "a.bin"
    ids = np.arange(999, dtype=np.uint16) % 257
    ids.tofile(file)

    def two_steps(plan, loop, state, done, batch_at, *, save, **_):
        yield 1, {"loss": 1.0, "gradient_norm": 1.0}
        state = save(1, state, {})()
        ids[::-1].tofile(file)
        yield 2, {"loss": 1.0, "gradient_norm": 1.0}
        save(2, state, {})

    monkeypatch.setattr("jaxpipe.train.loop._loop.run_steps", two_steps)
    settings = f"""output_dir={tmp_path} base_emb_dim=16 base_num_decoder_layers=1 steps=2
        base_mlp_dim=32 max_target_length=16 dtype=float32 enable_tensorboard=false
        per_device_batch_size=1 pipeline_engine=none dataset_type=tokens token_eod=256"""
    assert main(["train", *settings.split(), f"data_files={file}"]) == 1
    assert "a.bin' had other ids when the run began. Steps since" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "default" / "checkpoints").glob("[0-9]*")] == ["1"]


@pytest.mark.parametrize(
    ("axes", "across", "numbers"),
    [
        # Of 2 microbatches of 8 rows.
        ({"data": 2, "pipeline": 2, "fsdp": 2}, "data", [0, 1, 2, 3, 8, 9, 10, 11]),
        ({"data": 2, "pipeline": 2, "fsdp": 2}, "fsdp", [0, 1, 4, 5, 8, 9, 12, 13]),
        ({"data": 2, "pipeline": 2, "fsdp": 2}, "stage", list(range(16))),
        ({"context": 2, "fsdp": 4}, "context", list(range(16))),
    ],
)
def test_the_rows_of_a_process_are_made_and_placed_as_those_of_the_whole_batch(
    axes, across, numbers, monkeypatch
):
    sizes = {"ici_fsdp_parallelism": 1} | {f"ici_{a}_parallelism": n for a, n in axes.items()}
    settings = {"per_device_batch_size": 2.0, "num_pipeline_microbatches": 2, "packing": False}
    settings["text_separator"] = "\n"  # lines, of different lengths
    setup = set_up(Config.model_validate(TINY | settings | sizes), jax.devices())
    batches, asked = data_of(setup).training, []

    def rows(step: int, numbers: Sequence[int]) -> Batch:
        asked.append(list(numbers))
        return batches.rows(step, numbers)

    whole: Any = shard_batch_of_step(setup.batch, dataclasses.replace(batches, rows=rows), 3)
    # As if the first half of the mesh along an axis were the devices of this process.
    half = np.split(setup.mesh.devices, 2, setup.mesh.axis_names.index(across))[0].ravel()

    def of_half(self, shape):
        return {d: i for d, i in self.devices_indices_map(shape).items() if d in half}

    parts = []

    def placed(shape, where, part):
        parts.append({d: part(i) for d, i in of_half(where, shape).items()})
        return jnp.zeros(shape)

    monkeypatch.setattr(NamedSharding, "addressable_devices_indices_map", of_half)
    monkeypatch.setattr(jax, "make_array_from_callback", placed)
    shard_batch_of_step(setup.batch, dataclasses.replace(batches, rows=rows), 3)
    assert asked == [list(range(16)), numbers]
    for name, of_devices in zip(sorted(whole), parts, strict=True):  # in the order of pytrees
        shards = {shard.device: shard.data for shard in whole[name].addressable_shards}
        assert len(of_devices) == len(half) == 4
        for device, part in of_devices.items():
            np.testing.assert_array_equal(part, shards[device])
