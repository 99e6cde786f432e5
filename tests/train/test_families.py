"""Every family of models trains; keys that it does not read are refused; layers outside stages."""

import dataclasses
import functools
import io
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe import models
from jaxpipe.cli import main
from jaxpipe.engines import CONFIG_ENGINES
from jaxpipe.models import MODEL_FAMILIES
from jaxpipe.train import Config, set_up, train
from jaxpipe.train.optim import drop_router_biases, gradient_norm
from jaxpipe.train.plan._devices import DeviceLayout
from jaxpipe.train.plan._from_config import _check_experts
from jaxpipe.train.step import init_state, make_train_step, shard_batch, state_shardings

pytestmark = pytest.mark.ci

RUN: dict[str, Any] = {
    "base_emb_dim": 16,
    "base_num_decoder_layers": 5,
    "dtype": "float32",
    "max_target_length": 16,
    "per_device_batch_size": 2.0,
    "num_pipeline_microbatches": 4,
    "learning_rate": 1e-2,
    "learning_rate_schedule_steps": 3,
    "enable_tensorboard": False,
    "dataset_type": "text",
    "steps": 3,
}
TINY: dict[str, Any] = {
    **models.PRESETS["deepseek-tiny"],
    **RUN,
    "model_name": "deepseek-tiny",
    "load_balance_loss_weight": 0.1,
    "routed_bias_update_rate": 0.05,
}
CIRCULAR: dict[str, Any] = {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 4}
# Balance is a matter of a microbatch, so all runs have the same: of 4 rows.
PLAIN: dict[str, Any] = {
    "pipeline_engine": "none",
    "ici_fsdp_parallelism": 4,
    "ici_context_parallelism": 2,
}
SLICED: dict[str, Any] = {
    "pipeline_engine": "scheduled",
    "pipeline_schedule": "seq1f1b",
    "ici_pipeline_parallelism": 2,
    "ici_context_parallelism": 1,
}


def config_of(*settings: dict[str, Any]) -> Config:
    return Config.model_validate(functools.reduce(operator.or_, settings, TINY))


def run(folder, *settings: dict[str, Any]) -> list[dict[str, float]]:
    return train(config_of(*settings, {"output_dir": str(folder)}), stream=io.StringIO())


def losses(history) -> list[float]:
    return [metrics["loss"] for metrics in history]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run(tmp_path_factory.mktemp("plain"), PLAIN)


def test_a_pipelined_deepseek_with_split_experts_has_the_losses_of_the_plain_run(tmp_path, plain):
    axes = {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_expert_parallelism": 2}
    history = run(tmp_path, axes)
    np.testing.assert_allclose(losses(history), losses(plain), rtol=1e-5)
    for name in ("load_balance_loss", "gradient_norm"):
        np.testing.assert_allclose(history[-1][name], plain[-1][name], rtol=1e-5)
    assert losses(history)[-1] < losses(history)[0]


@pytest.mark.parametrize(
    "axes",
    [
        CIRCULAR,
        PLAIN | {"ici_fsdp_parallelism": 2, "ici_data_parallelism": 2},
        *(
            pytest.param(axes, marks=pytest.mark.slow)
            for axes in (
                CIRCULAR | {"pipeline_fsdp_ag_per_repeat": True},
                CIRCULAR | {"pipeline_engine": "scheduled", "pipeline_fsdp_ag_per_layer": True},
                {
                    "ici_pipeline_parallelism": 2,
                    "ici_fsdp_parallelism": 2,
                    "ici_data_parallelism": 2,
                    "shard_optimizer_over_data": True,
                },
            )
        ),
    ],
)
def test_whole_experts_on_each_device_of_fsdp_change_no_loss(tmp_path, plain, axes):
    stored = {"shard_exp_on_fsdp": True}
    gate = state_shardings(set_up(config_of(axes, stored), jax.devices()).step)["weights"]["stages"]
    *_, experts, embed, width = gate["moe"]["experts"]["gate"].spec
    assert (experts, embed, width) == (("expert", "fsdp", "context"), None, "tensor")
    history = run(tmp_path, axes, stored)
    np.testing.assert_allclose(losses(history), losses(plain), rtol=1e-5)
    np.testing.assert_allclose(history[-1]["gradient_norm"], plain[-1]["gradient_norm"], rtol=1e-5)


def test_experts_that_fsdp_does_not_divide_and_two_rules_for_them_are_refused():
    stored = {"shard_exp_on_fsdp": True}
    with pytest.raises(ValueError, match=r"experts.* has 8 in dim .* over .*fsdp 16"):
        config = config_of(stored, {"ici_fsdp_parallelism": 16, "pipeline_engine": "none"})
        set_up(config, jax.devices() * 2)
    axes = {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_expert_parallelism": 2}
    with pytest.raises(ValueError, match=r"stored in 4 parts.*computed in 2: .*at 1\."):
        set_up(config_of(stored, axes), jax.devices())
    rules = {"logical_axis_rules": [["exp", ["expert"]]]}
    with pytest.raises(ValueError, match=r"`shard_exp_on_fsdp` is true, and .* a rule for 'exp'"):
        set_up(config_of(stored, rules), jax.devices())


class Tpus(DeviceLayout):
    @property
    def platform(self) -> str:
        return "tpu"


def test_one_expert_on_each_tpu_is_refused_without_a_pipeline():
    setup = set_up(config_of(PLAIN, {"shard_exp_on_fsdp": True}), jax.devices())
    weights = setup.step.state.weights
    on_tpus = Tpus(weights.devices.mesh, weights.devices.rules)
    weights = dataclasses.replace(weights, devices=on_tpus)
    with pytest.raises(ValueError, match=r"there are 8 of them\. XLA:TPU gathers one on each"):
        _check_experts(CONFIG_ENGINES["none"], weights)
    _check_experts(CONFIG_ENGINES["circular"], weights)


@pytest.mark.slow
def test_a_checkpoint_of_whole_experts_and_zero_1_is_read_where_data_divides_no_expert(tmp_path):
    two = {"num_experts": 2, "num_experts_per_tok": 1, "n_routing_groups": 1}
    two |= {"topk_routing_group": 1, "checkpoint_period": 1, "shard_exp_on_fsdp": True}
    axes = {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_data_parallelism": 2}
    settings = (two, axes, {"shard_optimizer_over_data": True})
    plain = run(tmp_path / "plain", PLAIN, two, {"shard_exp_on_fsdp": False})
    first = run(tmp_path / "piped", *settings, {"steps": 2})
    second = run(tmp_path / "piped", *settings)
    np.testing.assert_allclose(losses(first + second), losses(plain), rtol=1e-5)


@pytest.mark.slow
def test_deepseek2_16b_made_small_trains_on_2_ranks_x_2_halves_of_the_experts(tmp_path):
    small = {
        **models.PRESETS["deepseek2-16b"],
        "model_name": "deepseek2-16b",
        "vocab_size": 320,
        "base_num_decoder_layers": 3,
        "base_num_query_heads": 2,
        "base_mlp_dim": 64,
        "base_moe_mlp_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "load_balance_loss_weight": 0.1,
        "routed_bias_update_rate": 0.0,
        "base_emb_dim": 32,
    }
    axes = {"ici_pipeline_parallelism": 2, "ici_expert_parallelism": 2, "ici_fsdp_parallelism": 2}
    plain, piped = (run(tmp_path / name, small, more) for name, more in (("a", PLAIN), ("b", axes)))
    np.testing.assert_allclose(losses(piped), losses(plain), rtol=1e-5)
    assert losses(piped)[-1] < losses(piped)[0]


@pytest.mark.slow
def test_layers_after_the_pipeline_change_nothing_and_a_run_may_go_on_with_others(tmp_path, plain):
    first = run(tmp_path, CIRCULAR, {"pipeline_parallel_layers": 2, "steps": 1})
    gathered = {"pipeline_fsdp_ag_per_repeat": True}
    second = run(tmp_path, CIRCULAR, gathered, {"steps": 2})
    third = run(tmp_path, CIRCULAR, {"pipeline_parallel_layers": 2})
    np.testing.assert_allclose(losses(first + second + third), losses(plain), rtol=1e-5)


def test_biases_of_routers_move_by_their_rate_against_the_load_and_nothing_else_touches_them():
    settings = {"adam_weight_decay": 0.5, "pipeline_parallel_layers": 2}
    setup = set_up(config_of(CIRCULAR, settings), jax.devices())
    with jax.set_mesh(setup.mesh):
        state = init_state(setup.step)
        zeros = np.zeros((setup.batch.num_rows, 16), np.int32)
        batch = dict.fromkeys(("tokens", "targets", "positions"), zeros)
        batch |= {"segment_ids": zeros + 1, "target_weights": zeros.astype(np.float32) + 1}
        train_step = make_train_step(setup.step)
        for count in (1, 2):
            state, metrics = train_step(state, shard_batch(setup.batch, batch))
            moved = np.concatenate([bias.ravel() for bias in biases(state["weights"])])
            # Tokens are alike: two experts have them all, which are not the same two in step 2.
            steps = moved / 0.05
            np.testing.assert_allclose(steps, np.round(steps), atol=1e-5)
            assert {*np.round(steps)} == ({-1, 1}, {0, 2})[count - 1]
    assert biases(state["optimizer"]) == []
    assert np.isfinite(metrics["gradient_norm"])


def biases(tree) -> list[np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [np.asarray(x) for path, x in leaves if "router'" in str(path) and "bias'" in str(path)]


def test_the_norm_of_gradients_leaves_biases_out():
    gradients = {"router": {"logits": jnp.ones(4), "bias": jnp.full(4, 9.0)}, "bias": jnp.ones(1)}
    kept = drop_router_biases(gradients)
    assert gradient_norm(kept) == np.sqrt(np.float32(5))


def test_maxtexts_name_of_the_llamas_is_accepted():
    assert Config.model_validate({"decoder_block": "llama2"}) == Config()
    with pytest.raises(ValueError, match=f"should be one of {', '.join(MODEL_FAMILIES)}"):
        Config.model_validate({"decoder_block": "llama1"})


@pytest.mark.parametrize("name", [*models.PRESETS])
def test_a_preset_is_a_model_of_its_family(name):
    preset: dict[str, Any] = models.PRESETS[name] | {"vocab_size": 320}
    setup = set_up(Config.model_validate(RUN | preset | PLAIN), jax.devices())
    family = MODEL_FAMILIES[preset.pop("decoder_block", "llama")]
    assert setup.state.weights.sizes == family.sizes(**preset)
    sizes = setup.state.weights.sizes
    assert setup.step.pipe.model.tied == getattr(sizes, "logits_via_embedding", False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head_dim": 8}, "`head_dim` is 8 and `decoder_block` is 'deepseek', which has no such"),
        ({"logits_via_embedding": False}, "`logits_via_embedding` is False .* Leave it at True"),
        ({"decoder_block": "llama"}, "`base_.*|`first_num.* `decoder_block` is 'llama'"),
        ({"megablox": True}, "`megablox` is true, but the devices are cpus"),
        ({"num_experts_per_tok": 9}, "`num_experts_per_tok` is 9"),
        ({"rope_type": "llama3.1"}, "`rope_type` is 'llama3.1'. Give 'default' or 'yarn'"),
        ({"first_num_dense_layers": 5}, "leave at least one layer with experts"),
        ({"pipeline_parallel_layers": 5}, "is 5, and there are 4 layers .* Give 1 to 4, or -1"),
        ({"pipeline_parallel_layers": 3}, "`pipeline_parallel_layers` is 3, not a multiple of"),
        (
            {"base_num_decoder_layers": 6},
            "`base_num_decoder_layers` - `first_num_dense_layers` is 5, not .*_layers=4`: the oth",
        ),
        ({"num_pipeline_repeats": 3}, "`num_pipeline_repeats` is 3, but 4 layers"),
    ],
)
def test_settings_that_no_deepseek_can_have_are_refused_before_anything_compiles(settings, message):
    with pytest.raises(ValueError, match=message):
        set_up(config_of(CIRCULAR, settings), jax.devices())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_experts": 8}, "`num_experts` is 8 and `decoder_block` is 'llama'"),
        ({"routed_bias_update_rate": 1.0}, "`routed_bias_update_rate` is 1.0 and"),
        ({"megablox": False}, "`megablox` is False and `decoder_block` is 'llama'"),
        ({"rope_type": "yarn"}, "`rope_type` is 'yarn'. Give 'default' or 'llama3.1'"),
    ],
)
def test_settings_of_deepseek_are_refused_for_a_llama(settings, message):
    with pytest.raises(ValueError, match=message):
        set_up(Config.model_validate(RUN | PLAIN | settings), jax.devices())


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "qwen3-tiny",
            {"use_qk_norm": False},
            "'qwen3', where it is True in every model. Give `us",
        ),
        ("llama-tiny", {"use_qk_norm": True}, "'llama', where it is False .*, or another `decoder"),
        ("mistral-tiny", {"use_qk_norm": True}, "`decoder_block` is 'mistral', where it is False"),
        ("gemma3-tiny", {"use_qk_norm": False}, "`decoder_block` is 'gemma3', where it is True in"),
        ("gemma3-tiny", {"rope_type": "llama3.1"}, "'gemma3', where it is 'default' in every mod"),
        ("llama-tiny", {"sliding_window_size": 8}, "`sliding_window_size` is 8 and `decoder_bloc"),
        ("gpt-oss-tiny", {"rope_type": "default"}, "'gpt_oss', where it is 'yarn' in every model"),
        (
            "deepseek-tiny",
            {"rope_factor": 4.0},
            "`rope_factor` is 4.0 and `rope_type` is 'default'",
        ),
        ("llama-tiny", {"rope_factor": 4.0}, "`decoder_block` is 'llama', which has no such thing"),
        (
            "llama4-tiny",
            {"base_num_decoder_layers": 7},
            "is 7, not a multiple of `interleave_moe_l",
        ),
        (
            "llama4-tiny",
            {"nope_layer_interval": 3},
            "is 3, not a multiple of `interleave_moe_layer",
        ),
        (
            "qwen3-moe-tiny",
            {"interleave_moe_layer_step": 2},
            "`interleave_moe_layer_step` is 2 and",
        ),
        ("mixtral-tiny", {"norm_topk_prob": False}, "'mixtral', where it is True in every model"),
        ("mixtral-tiny", {"base_mlp_dim": 32}, "`base_mlp_dim` is 32 and `base_moe_mlp_dim` 64"),
        ("qwen3-moe-tiny", {"shared_experts": 1}, "`shared_experts` is 1 and `decoder_block` is"),
        ("qwen3-moe-tiny", {"routed_bias": True}, "`routed_bias` is True and `decoder_block` is"),
        ("qwen3-tiny", {"num_experts": 8}, "`num_experts` is 8 and `decoder_block` is 'qwen3', wh"),
        ("deepseek-tiny", {"use_qk_norm": True}, "`use_qk_norm` is True and `decoder_block` is"),
        (
            "qwen3-moe-tiny",
            SLICED,
            "`decoder_block` is 'qwen3_moe', whose experts are balanced over whole sequences",
        ),
    ],
)
def test_settings_that_no_model_of_a_family_has_are_refused(name, settings, message):
    values: dict[str, Any] = RUN | models.PRESETS[name]
    values |= {"base_num_decoder_layers": 4, "base_emb_dim": 16} | PLAIN | settings
    with pytest.raises(ValueError, match=message):
        set_up(Config.model_validate(values), jax.devices())


def test_no_layers_in_the_pipeline_are_refused():
    with pytest.raises(ValueError, match=r"pipeline_parallel_layers"):
        config_of({"pipeline_parallel_layers": 0})


@pytest.mark.slow
def test_a_llama_with_layers_after_the_pipeline_has_the_losses_of_the_plain_run(tmp_path):
    def losses_of(folder: str, *settings: dict[str, Any]) -> list[float]:
        values = functools.reduce(operator.or_, settings, RUN | {"steps": 2})
        config = Config.model_validate(values | {"output_dir": str(tmp_path / folder)})
        return losses(train(config, stream=io.StringIO()))

    piped = losses_of("a", CIRCULAR, {"pipeline_parallel_layers": 4})
    np.testing.assert_allclose(piped, losses_of("b", PLAIN), rtol=1e-5)


@pytest.mark.slow
def test_a_deepseek_is_compiled_ahead(capsys):
    settings = [f"{k}={v}" for k, v in CIRCULAR.items()]
    sizes = ["base_emb_dim=16", "base_num_decoder_layers=3", "max_target_length=16"]
    settings += ["model_name=deepseek-tiny", "emulate_devices=8", "dtype=float32", *sizes]
    assert main(["compile", *settings]) == 0
    text = capsys.readouterr().out
    assert text.startswith("deepseek-tiny: ")
    assert "1 repeat(s) x 2 rank(s) x 1 layer(s) (1 before them)" in text
