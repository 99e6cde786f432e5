"""`jaxpipe convert` from the outside."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxpipe.cli import main
from jaxpipe.cli.commands import parse_size

GOLDEN = Path(__file__).parents[1] / "train" / "golden" / "llama2"
RUN = [
    "dtype=float32",
    "max_target_length=16",
    "per_device_batch_size=1",
    "enable_tensorboard=false",
    "enable_progress_bar=false",
]
TINY = [*RUN, "base_emb_dim=16", "base_num_decoder_layers=2", "base_mlp_dim=24"]


def failure(capsys, *arguments: object) -> str:
    assert main(["convert", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_theirs_become_ours_are_trained_and_become_theirs_again(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["convert", str(GOLDEN), "ours", "--dtype", "float32"]) == 0
    said, command = capsys.readouterr().out.splitlines()
    assert said.endswith("llama, 0.02M parameters, 21 tensors in 1 file(s); result in float32")
    assert command == "jaxpipe train ours/config.yml init_from=ours ..."
    run = ["train", "ours/config.yml", "init_from=ours", *RUN, "steps=1", "learning_rate=0"]
    assert main(run) == 0
    assert main(["convert", "runs/default", "theirs", "--max-shard-size", "20kB"]) == 0
    assert "llama, 0.02M parameters, 21 tensors in 5 file(s)" in capsys.readouterr().out
    expected = load_file(GOLDEN / "model.safetensors")
    files = [*Path("theirs").glob("*.safetensors")]
    found = {name: x for file in files for name, x in load_file(file).items()}
    assert found.keys() == expected.keys()
    for name, leaf in found.items():
        np.testing.assert_array_equal(leaf, expected[name].astype(np.float32))


def test_a_trained_run_becomes_theirs_with_its_sizes(tmp_path, capsys):
    settings = [*TINY, "rope_type=llama3.1", f"output_dir={tmp_path}", "steps=1"]
    assert main(["train", *settings]) == 0
    out = tmp_path / "theirs"
    assert main(["convert", str(tmp_path / "default"), str(out), "--max-length", "512"]) == 0
    config = json.loads((out / "config.json").read_text())
    sizes = ("hidden_size", "num_hidden_layers", "max_position_embeddings", "torch_dtype")
    assert [config[name] for name in sizes] == [16, 2, 512, "float32"]
    assert config["rope_scaling"]["factor"] == 8.0
    assert config["tie_word_embeddings"] is True


def test_sizes_of_files_have_units():
    assert [*map(parse_size, ("5GB", "200 MB", "3kb", "17", "8B"))] == [
        5 * 10**9, 2 * 10**8, 3000, 17, 8,
    ]  # fmt: skip


def test_wrong_arguments_give_one_message_and_exit_code_2(tmp_path, capsys):
    nowhere, out = tmp_path / "nowhere", tmp_path / "out"
    assert f"{nowhere} is not a folder" in failure(capsys, nowhere, out)
    assert "has neither `checkpoints` nor `weights`" in failure(capsys, tmp_path, out)
    message = failure(capsys, GOLDEN, out, "--step", 3)
    assert "`--step` is 3 and" in message
    assert "It is for the way to Hugging Face alone" in message
    message = failure(capsys, tmp_path, out, "--max-shard-size", "5TB")
    assert "`--max-shard-size` is '5TB'. Give a size such as 5GB" in message
    assert "`--max-shard-size` is '0'" in failure(capsys, tmp_path, out, "--max-shard-size", 0)
    assert not out.exists()
    with pytest.raises(SystemExit):
        main(["convert", str(GOLDEN), str(out), "--dtype", "int8"])


TOKENIZER = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": '{"model_max_length": 2048}',
    "chat_template.jinja": "{{ messages }}",
    "generation_config.json": '{"temperature": 0.6}',
}


def test_the_tokenizer_and_generation_settings_go_both_ways(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = Path(shutil.copytree(GOLDEN, "source"))
    for name, text in TOKENIZER.items():
        (source / name).write_text(text)
    config = json.loads((source / "config.json").read_text())
    ids = {"bos_token_id": 1, "eos_token_id": [2, 7]}
    (source / "config.json").write_text(json.dumps(config | ids))
    assert main(["convert", "source", "ours"]) == 0
    assert f"ours/hugging_face: {', '.join(TOKENIZER)}\n" in capsys.readouterr().out

    # Runs that begin with a converted model, and with a run that did.
    for run, before in (("first", "ours"), ("second", "first")):
        Path(run).mkdir()
        shutil.copytree("ours/weights", f"{run}/checkpoints")
        Path(run, "config.yml").write_text(f"init_from: {before}\ntokenizer_path: ''\n")
    assert main(["convert", "second", "theirs"]) == 0
    for name, text in TOKENIZER.items():
        assert Path("theirs", name).read_text() == text
    found = json.loads(Path("theirs", "config.json").read_text())
    assert {name: found[name] for name in ids} == ids

    # A tokenizer of the run's own is not that of the model.
    Path("own.json").write_text('{"own": 1}')
    Path("second", "config.yml").write_text("init_from: first\ntokenizer_path: own.json\n")
    assert main(["convert", "second", "again"]) == 0
    assert Path("again", "tokenizer.json").read_text() == '{"own": 1}'
    assert not Path("again", "generation_config.json").exists()
    assert json.loads(Path("again", "config.json").read_text())["eos_token_id"] is None
