"""Runs that begin with the weights of a folder."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpipe import models
from jaxpipe.hugging_face import from_hugging_face
from jaxpipe.train import Config, load_config, set_up, train
from jaxpipe.train.checkpoint import check_same_sizes, first_state

from .converted import DEEPSEEK, GOLDEN, LLAMA, make_run
from .runs import flat

pytestmark = pytest.mark.ci

RUN: dict[str, Any] = {
    "steps": 2,
    "max_target_length": 16,
    "enable_tensorboard": False,
    "enable_progress_bar": False,
    "dtype": "float32",
    "per_device_batch_size": 4.0,
    "num_pipeline_microbatches": 4,
    "ici_fsdp_parallelism": 1,
}
ENGINES: dict[str, dict[str, Any]] = {
    "none": {"pipeline_engine": "none", "ici_fsdp_parallelism": 4},
    "circular": {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2},
    "mpmd": {"pipeline_engine": "mpmd", "ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2},
}


def config_of(folder: Path, source: Path, **settings: Any) -> Config:
    values = RUN | {"output_dir": str(folder), "init_from": str(source)} | settings
    pairs = [f"{key}={value}" for key, value in values.items()]
    return load_config([source / "config.yml"], pairs, presets=models.PRESETS)


def refusal(source: Path, tmp_path: Path, **settings: Any) -> str:
    with pytest.raises(ValueError) as error:
        train(config_of(tmp_path / "runs", source, **settings))
    assert not (tmp_path / "runs" / "default" / "metrics.jsonl").exists()
    return str(error.value)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "ours"
    from_hugging_face(GOLDEN / "llama2", folder)
    return folder


@pytest.fixture(autouse=True)
def four_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_begins_with_the_weights_and_with_fresh_moments(
    engine: str, llama: Path, tmp_path: Path
):
    config = config_of(tmp_path, llama, weight_dtype="float32", **ENGINES[engine])
    setup = set_up(config, jax.devices())
    state = first_state(setup.step, config.init_from)
    found = flat(setup, state)
    plain = config_of(tmp_path, llama, weight_dtype="float32", **ENGINES["none"])
    setup = set_up(plain, jax.devices())
    expected = flat(setup, first_state(setup.step, plain.init_from))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert found["step"] == 0
    assert not any(np.any(x) for x in jax.tree.leaves(found["optimizer"]))


def test_a_run_trains_from_them_resumes_by_itself_and_gives_them_to_another(
    llama: Path, tmp_path: Path
):
    settings = {"weight_dtype": "float32", **ENGINES["circular"]}
    settings |= {"learning_rate_schedule_steps": 2}
    first = train(config_of(tmp_path, llama, **settings))
    third = train(config_of(tmp_path, llama, **settings, init_from="nowhere", steps=3))
    assert len(third) == 1
    run = tmp_path / "default"
    copied = run / "checkpoints" / "9" / "state"  # a step that is not all there yet
    copied.mkdir(parents=True)
    before = sorted(run.rglob("*"))
    again = train(config_of(tmp_path, run, **settings, run_name="again", init_from=str(run)))
    assert len(again) == 2
    assert again[0]["loss"] < first[0]["loss"]
    assert sorted(run.rglob("*")) == before


def test_layers_after_the_pipeline_may_be_others_than_in_the_folder(tmp_path: Path):
    weights = make_run(tmp_path / "run", DEEPSEEK, layers_after=2)
    (tmp_path / "run" / "config.yml").write_text(yaml_of(DEEPSEEK, "deepseek"))
    setup = set_up(config_of(tmp_path, tmp_path / "run", **ENGINES["none"]), jax.devices())
    found = jax.device_get(first_state(setup.step, str(tmp_path / "run"))["weights"])
    after = weights["head"].pop("layers")
    stages = jax.tree.map(lambda *x: np.concatenate(x)[None, None], weights["stages"], after)
    jax.tree.map(np.testing.assert_array_equal, found, weights | {"stages": stages})


def yaml_of(sizes: Any, block: str) -> str:
    pairs = {"decoder_block": block, **vars(sizes)}
    return "\n".join(f"{key}: {str(value).lower()}" for key, value in pairs.items())


def test_another_model_is_refused_with_its_leaves(llama: Path, tmp_path: Path):
    message = refusal(llama, tmp_path, base_mlp_dim=48, **ENGINES["none"])
    assert f"`init_from` is '{llama}': {llama / 'weights'} step 0 is of another model" in message
    assert "3 of 12 leaves differ" in message
    assert "bfloat16[2, 32, 40] in the checkpoint, bfloat16[2, 32, 48] in the model" in message
    assert message.endswith("`config.yml` in that folder has them.")
    message = refusal(llama, tmp_path, logits_via_embedding=True, **ENGINES["none"])
    assert "head/logits: only in the checkpoint" in message
    message = refusal(llama, tmp_path, base_num_decoder_layers=4, **ENGINES["none"])
    assert "stages/mlp/up: bfloat16[2, 32, 40] in the checkpoint, bfloat16[4, 32, 40]" in message


def test_sizes_that_no_leaf_shows_must_be_the_same_too(llama: Path, tmp_path: Path):
    message = refusal(llama, tmp_path, rope_max_timescale=500000.0, **ENGINES["none"])
    assert "rope_max_timescale is 10000.0 in the checkpoint, 500000.0 in the config" in message


def test_nothing_is_rounded(tmp_path: Path):
    make_run(tmp_path / "run", LLAMA)
    (tmp_path / "run" / "config.yml").write_text(yaml_of(LLAMA, "llama"))
    message = refusal(tmp_path / "run", tmp_path, weight_dtype="bfloat16", **ENGINES["none"])
    assert "float32[16] in the checkpoint, bfloat16[16] in the model" in message


def test_a_folder_without_weights_is_refused(llama: Path, tmp_path: Path):
    message = refusal(llama, tmp_path, init_from=str(tmp_path), **ENGINES["none"])
    assert f"{tmp_path} has neither `checkpoints` nor `weights`" in message
    (tmp_path / "weights").mkdir()
    message = refusal(llama, tmp_path, init_from=str(tmp_path), **ENGINES["none"])
    assert "does not have any step. It has: none." in message


def test_a_checkpoint_from_before_a_size_was_a_key_has_its_default(tmp_path: Path):
    setup = set_up(Config.model_validate(RUN | ENGINES["none"]), jax.devices())
    sizes = setup.state.weights.sizes
    saved = dict(vars(sizes))
    del saved["llama31_rope_factor"]
    check_same_sizes(saved, sizes, "x")
    with pytest.raises(ValueError, match=r"x is of another model:\n  vocab_size is 3 in the"):
        check_same_sizes(saved | {"vocab_size": 3}, sizes, "x")
