"""A decoder of Flax modules trains as the model's functions do, through Linen and through NNX."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpipe import models
from jaxpipe.cli import main
from jaxpipe.train import Config, read_metrics, set_up
from jaxpipe.train.step import init_state, make_train_step, shard_batch

from .runs import data_of

pytestmark = pytest.mark.ci

PR = (
    "model_name=llama2-7b dataset_type=synthetic debug_sharding=true per_device_batch_size=2 "
    "max_target_length=32 num_pipeline_microbatches=4 enable_checkpointing=false "
    "async_checkpointing=false"
)
"""The command of MaxText's PR 2885, but for the settings of pipelines."""

PIPELINE = (
    "ici_pipeline_parallelism=2 num_layers_per_pipeline_stage=2 scan_layers_per_stage=false "
    "ici_fsdp_parallelism=4"
)
TINY = (
    "base_emb_dim=16 base_num_decoder_layers=8 base_num_query_heads=4 base_num_kv_heads=2 "
    "base_mlp_dim=32 head_dim=8 vocab_size=64 emulate_devices=8 steps=3 dtype=float32 "
    "learning_rate=1e-2 enable_tensorboard=false enable_progress_bar=false"
)
NNX, LINEN = "enable_nnx=true pure_nnx_decoder=true", "enable_nnx=false"


def metrics(folder: Path, *settings: str) -> list[dict[str, float]]:
    words = f"{PR} {TINY} {' '.join(settings)}".split()
    assert main(["train", *words, f"output_dir={folder}"]) == 0
    return read_metrics(folder / "default" / "metrics.jsonl")


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    return metrics(tmp_path_factory.mktemp("functions"), PIPELINE)


def assert_same(history, expected) -> None:
    for name in ("loss", "gradient_norm"):
        values, wanted = ([of_step[name] for of_step in run] for run in (history, expected))
        np.testing.assert_allclose(values, wanted, rtol=1e-5)
    assert len(history) == 3


def test_without_a_pipeline_the_losses_are_those_of_the_functions(tmp_path, functions):
    plain = "pipeline_engine=none ici_fsdp_parallelism=4 ici_context_parallelism=2"
    assert_same(metrics(tmp_path, plain), functions)
    assert functions[-1]["loss"] < functions[0]["loss"]


@pytest.mark.slow
def test_unrolled_ticks_have_the_losses_of_the_loop(tmp_path, functions):
    assert_same(metrics(tmp_path, PIPELINE, "scan_pipeline_iterations=false"), functions)


@pytest.mark.parametrize("frontend", [NNX, LINEN], ids=["nnx", "linen"])
def test_a_decoder_of_flax_modules_has_the_losses_of_the_functions(tmp_path, functions, frontend):
    assert_same(metrics(tmp_path, PIPELINE, frontend), functions)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            f"{NNX} pipeline_fsdp_ag_once=true logits_via_embedding=true num_vocab_tiling=4",
            marks=pytest.mark.slow,
        ),
        f"{LINEN} pipeline_fsdp_ag_per_repeat=true pipeline_parallel_layers=4 "
        "set_remat_policy_on_layers_per_stage=true",
        pytest.param(
            f"{NNX} pipeline_delay_activation_forwarding=true scan_pipeline_iterations=false "
            "scan_pipeline_repeats=false",
            marks=pytest.mark.slow,
        ),
        f"{LINEN} shard_mode=explicit pipeline_fsdp_ag_per_repeat=true",
        f"{NNX} pipeline_engine=scheduled pipeline_schedule=1f1b pipeline_fsdp_ag_per_layer=true "
        "num_layers_per_pipeline_stage=4",
        f"{LINEN} pipeline_engine=mpmd pipeline_schedule=1f1b num_layers_per_pipeline_stage=4",
    ],
    ids=[
        "once, tied",
        "per repeat, layers after",
        "delayed, written out",
        "explicit, per repeat",
        "1F1B, per layer",
        "programs of ranks",
    ],
)
def test_settings_of_the_pipeline_reach_the_frontend(tmp_path, functions, settings):
    expected = functions
    if "logits_via_embedding" in settings:
        expected = metrics(tmp_path / "functions", PIPELINE, "logits_via_embedding=true")
    assert_same(metrics(tmp_path / "flax", PIPELINE, settings), expected)


@pytest.mark.slow
def test_in_bfloat16_it_has_nearly_the_loss_and_the_gradients_of_float32():
    settings = {"model_name": "llama-tiny", "base_emb_dim": 16, "base_num_decoder_layers": 2}
    settings |= {"base_mlp_dim": 32, "head_dim": 8, "max_target_length": 16, "vocab_size": 320}
    settings |= {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2, "dtype": "bfloat16"}
    settings |= {"num_pipeline_microbatches": 8, "per_device_batch_size": 4.0}
    norms = []
    for frontend in ({}, {"enable_nnx": False}, {"dtype": "float32"}):
        setup = set_up(Config.model_validate(settings | frontend), jax.devices()[:4])
        with jax.set_mesh(setup.mesh), jax.numpy_dtype_promotion("standard"):
            batch = shard_batch(setup.batch, data_of(setup).training(0))
            _, metrics_of_step = make_train_step(setup.step)(init_state(setup.step), batch)
        norms.append([float(metrics_of_step[name]) for name in ("loss", "gradient_norm")])
    functions, linen, exact = norms
    np.testing.assert_allclose(functions, exact, rtol=1e-2)
    np.testing.assert_allclose(linen, exact, rtol=1e-2)


def test_what_experts_sum_up_is_sown_and_has_its_gradient():
    settings = {
        **models.PRESETS["deepseek-tiny"],
        "base_emb_dim": 16,
        "base_num_decoder_layers": 3,
        "num_experts": 4,
        "dtype": "float32",
        "ici_pipeline_parallelism": 2,
        "ici_fsdp_parallelism": 2,
        "per_device_batch_size": 2,
        "max_target_length": 16,
        "load_balance_loss_weight": 0.1,
        "routed_bias_update_rate": 0.01,
    }
    frontends = ({}, {"enable_nnx": True, "pure_nnx_decoder": True}, {"enable_nnx": False})
    runs = []
    for frontend in frontends:
        setup = set_up(Config.model_validate(settings | frontend), jax.devices()[:4])
        with jax.set_mesh(setup.mesh):
            batch = shard_batch(setup.batch, data_of(setup).training(0))
            runs.append(jax.device_get(make_train_step(setup.step)(init_state(setup.step), batch)))
    true, *found = runs
    for state, metrics_of_step in found:
        assert metrics_of_step.keys() == true[1].keys() > {"load_balance_loss"}
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), metrics_of_step, true[1])
        close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7)
        jax.tree.map(close, state["weights"], true[0]["weights"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pure_nnx_decoder": True}, "`pure_nnx_decoder` is True and `enable_nnx` None"),
        ({"enable_nnx": True}, "`pure_nnx_decoder` is False and `enable_nnx` True"),
        ({"enable_nnx": False, "pure_nnx_decoder": True}, "is True and `enable_nnx` False"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Config.model_validate(settings)


def test_without_flax_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxpipe.train.plan._flax_layer", None)
    monkeypatch.delattr("jaxpipe.train.plan._flax_layer", raising=False)
    config = Config.model_validate({"ici_pipeline_parallelism": 2, "enable_nnx": False})
    with pytest.raises(ValueError, match=r'pip install "jaxpipe\[flax\]"'):
        set_up(config, jax.devices())
