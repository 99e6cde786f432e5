"""The loop: engines agree step by step, runs resume exactly, any layout goes on from any other."""

import functools
import io
import json
import operator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpipe.kernels import AttentionPlan, Scores
from jaxpipe.train import Config, read_metrics, set_up, train
from jaxpipe.train.step import make_train_step, state_shapes, state_shardings

TINY: dict[str, Any] = {
    "base_emb_dim": 16,
    "base_num_decoder_layers": 4,
    "base_mlp_dim": 32,
    "head_dim": 8,
    "dtype": "float32",
    "max_target_length": 16,
    "per_device_batch_size": 2.0,
    "num_pipeline_microbatches": 4,
    "learning_rate": 1e-2,
    "enable_tensorboard": False,
    "steps": 4,
}
CIRCULAR: dict[str, Any] = {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 4}
PLAIN: dict[str, Any] = {
    "pipeline_engine": "none",
    "ici_fsdp_parallelism": 8,
    "num_pipeline_microbatches": 1,
}


def config_of(*settings: dict[str, Any]) -> Config:
    return Config.model_validate(functools.reduce(operator.or_, settings, TINY))


def run(folder, **settings) -> list[dict[str, float]]:
    config = config_of({"output_dir": str(folder)}, settings)
    return train(config, stream=io.StringIO())


def losses(history) -> list[float]:
    return [metrics["loss"] for metrics in history]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return losses(run(tmp_path_factory.mktemp("whole"), **CIRCULAR, dataset_type="text"))


def test_the_pipelined_run_has_the_losses_of_the_plain_run(tmp_path, uninterrupted):
    plain = losses(run(tmp_path, **PLAIN, dataset_type="text"))
    np.testing.assert_allclose(plain, uninterrupted, rtol=1e-5)
    assert uninterrupted[-1] < uninterrupted[0]


def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(tmp_path, uninterrupted):
    settings: dict[str, Any] = {
        **CIRCULAR,
        "dataset_type": "text",
        "learning_rate_schedule_steps": 4,
    }
    first = losses(run(tmp_path, **settings, steps=2))
    rest = losses(run(tmp_path, **settings, steps=4))
    assert first + rest == uninterrupted
    lines = [json.loads(x) for x in (tmp_path / "default/metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == uninterrupted
    assert run(tmp_path, **settings, steps=4) == []


@pytest.mark.parametrize(
    ("tied", "together"),
    [
        (False, False),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
        pytest.param(True, True, marks=pytest.mark.slow),
    ],
)
def test_ranks_with_slices_of_sequences_have_the_losses_of_the_plain_run(
    tmp_path, tied: bool, together: bool
):
    settings = {"dataset_type": "text", "logits_via_embedding": tied}
    sliced = {
        "pipeline_engine": "scheduled",
        "ici_pipeline_parallelism": 2,
        "ici_fsdp_parallelism": 2,
        "ici_context_parallelism": 2,
        "pipeline_vocab_parallel": together,
    }
    plain = losses(run(tmp_path / "a", **PLAIN, **settings))
    np.testing.assert_allclose(losses(run(tmp_path / "b", **sliced, **settings)), plain, rtol=1e-5)


@pytest.mark.parametrize(
    "other",
    [
        {"ici_pipeline_parallelism": 4, "ici_fsdp_parallelism": 2},
        pytest.param({**CIRCULAR, "num_layers_per_pipeline_stage": 2}, marks=pytest.mark.slow),
        pytest.param(PLAIN, marks=pytest.mark.slow),
    ],
    ids=["4 ranks", "2 layers per stage", "no pipeline"],
)
def test_any_layout_goes_on_from_any_checkpoint(tmp_path, uninterrupted, other):
    settings: dict[str, Any] = {"dataset_type": "text", "learning_rate_schedule_steps": 4}
    first = losses(run(tmp_path, **CIRCULAR, **settings, steps=2))
    rest = losses(run(tmp_path, **other, **settings, steps=4))
    np.testing.assert_allclose(first + rest, uninterrupted, rtol=1e-5)


def test_moments_and_weights_are_split_alike():
    setup = set_up(config_of(CIRCULAR), jax.devices())
    where = state_shardings(setup.step)
    adam = next(part for part in where["optimizer"] if hasattr(part, "mu"))
    assert adam.mu == adam.nu == where["weights"]
    spec = where["weights"]["stages"]["mlp"]["up"].spec
    assert spec[:3] == (None, "stage", None)
    assert "fsdp" in spec[3]


def test_dropout_is_the_same_with_and_without_a_pipeline_and_differs_by_step(tmp_path):
    settings = {
        "dropout_rate": 0.3,
        "learning_rate": 0.0,
        "steps": 2,
        "enable_checkpointing": False,
    }
    pipelined = losses(run(tmp_path / "a", **CIRCULAR, **settings))
    # The same 4 microbatches of 4 rows: on 2 data shards x 4 shards of the sequence.
    axes = {"ici_data_parallelism": 2, "ici_context_parallelism": 4, "ici_fsdp_parallelism": 1}
    plain = losses(run(tmp_path / "b", pipeline_engine="none", **axes, **settings))
    np.testing.assert_allclose(plain, pipelined, rtol=1e-5)
    quiet = losses(run(tmp_path / "c", **CIRCULAR, **(settings | {"enable_dropout": False})))
    assert abs(quiet[0] - pipelined[0]) > 1e-4


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path):
    run(tmp_path, **CIRCULAR, steps=1)
    with pytest.raises(ValueError, match=r"(?s)another model.*base_mlp_dim is 32 .* 64 in the con"):
        run(tmp_path, **CIRCULAR, steps=2, base_mlp_dim=64)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"num_pipeline_microbatches": 3},
            "There are 3 microbatches, not a multiple of",
        ),
        ({"num_pipeline_microbatches": 6}, "The batch .* is 16, not a multiple of .* = 6"),
        ({"base_num_decoder_layers": 5}, "`base_num_decoder_layers` is 5, not a multiple of"),
        (
            {"num_pipeline_repeats": 3},
            "`num_pipeline_repeats` is 3, but 4 layers .* make 2",
        ),
        ({"num_pipeline_microbatches": 1}, "There are 1 microbatches for 2 ranks"),
        ({"ici_fsdp_parallelism": 8}, "needs 16 devices and there are 8.*`emulate_devices=16`"),
        ({"ici_fsdp_parallelism": 2}, "needs 4 devices and there are 8: some would idle"),
        ({"num_pipeline_microbatches": 8}, "`microbatches` has 2 in dim 1 .* over fsdp 4"),
        ({"base_emb_dim": 18}, r"`embed.table` has 18 in dim 1 of \(320, 18\)"),
        (
            {"num_pipeline_microbatches": 2, "pipeline_delay_activation_forwarding": True},
            "with delayed forwarding .* at least 4",
        ),
        ({"logical_axis_rules": (("mlp", "tensr"),)}, "maps 'mlp' to 'tensr'"),
        (
            {"num_vocab_tiling": 3},
            "`max_target_length` is 16, not a multiple of `num_vocab_tiling` x .* = 3",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_compiles(settings, message):
    with pytest.raises(ValueError, match=message):
        set_up(config_of(CIRCULAR, settings), jax.devices())


@pytest.mark.slow
def test_a_run_that_stops_while_it_saves_resumes_with_no_step_missing_in_its_metrics(
    tmp_path, monkeypatch
):
    save = ocp.CheckpointManager.save

    def fail(checkpoints, step, **arguments):
        save(checkpoints, step, **arguments)
        raise KeyboardInterrupt

    settings = {**CIRCULAR, "checkpoint_period": 2, "steps": 4}
    monkeypatch.setattr(ocp.CheckpointManager, "save", fail)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, **settings)
    monkeypatch.undo()
    run(tmp_path, **settings)
    lines = read_metrics(tmp_path / "default" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]


def test_what_fails_in_the_middle_is_not_blamed_on_the_settings(tmp_path):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            if text.startswith("step 2"):
                raise ValueError("I/O operation on closed file")
            return super().write(text)

    config = config_of({"output_dir": str(tmp_path)}, CIRCULAR)
    with pytest.raises(RuntimeError, match="The run failed after step 2"):
        train(config, stream=Closed())


@pytest.mark.parametrize(
    "weight_dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"]
)
def test_bfloat16_trains_with_and_without_a_pipeline_to_nearly_the_same_loss(
    tmp_path, weight_dtype
):
    settings = {"dtype": "bfloat16", "weight_dtype": weight_dtype, "enable_checkpointing": False}
    # JAX itself mixes types where it lowers `jax.nn.dot_product_attention` in bfloat16.
    with jax.numpy_dtype_promotion("standard"):
        pipelined = losses(run(tmp_path / "a", **CIRCULAR, **settings))
        plain = losses(run(tmp_path / "b", **PLAIN, **settings))
    np.testing.assert_allclose(pipelined, plain, rtol=2e-2)
    assert len(pipelined) == 4


@pytest.mark.slow
def test_without_a_pipeline_layers_run_forward_once_and_again_once_in_the_backward():
    setup = set_up(config_of(PLAIN), jax.devices())
    with jax.set_mesh(setup.mesh):
        lowered = make_train_step(setup.step).lower(state_shapes(setup.state), setup.batch.shapes)
    norms_of_layer, norms_of_head = 2, 1
    assert lowered.as_text().count("stablehlo.rsqrt") == 2 * norms_of_layer + norms_of_head


def test_without_rematerialisation_the_losses_are_the_same(tmp_path, uninterrupted):
    settings = {**CIRCULAR, "dataset_type": "text", "remat_policy": "none"}
    np.testing.assert_allclose(losses(run(tmp_path, **settings)), uninterrupted, rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            {"remat_policy": "minimal_offloaded", "set_remat_policy_on_layers_per_stage": True},
            marks=pytest.mark.slow,
        ),
        {
            "remat_policy": "custom",
            "context": "device",
            "mlpwo": "offload",
            "set_remat_policy_on_pipeline_iterations": False,
            "set_remat_policy_on_layers_per_stage": True,
        },
        {"num_vocab_tiling": 4},
    ],
    ids=lambda settings: next(iter(settings.values())),
)
def test_what_is_kept_and_how_the_loss_is_cut_change_no_loss(tmp_path, uninterrupted, settings):
    history = run(tmp_path, **CIRCULAR, dataset_type="text", **settings)
    np.testing.assert_allclose(losses(history), uninterrupted, rtol=1e-5)


def test_a_rule_of_the_users_own_changes_where_weights_lie_and_no_number(tmp_path, uninterrupted):
    rules = (("embed", None), ("mlp", "fsdp"))
    settings = {**CIRCULAR, "logical_axis_rules": rules}
    where = state_shardings(set_up(config_of(settings), jax.devices()).step)
    assert where["weights"]["stages"]["mlp"]["up"].spec == P(None, "stage", None, None, "fsdp")
    history = run(tmp_path, **settings, dataset_type="text")
    np.testing.assert_allclose(losses(history), uninterrupted, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "the devices are cpus, not TPUs"),
        ({"max_target_length": 100}, "has 100 tokens of a sequence, not a multiple of 128"),
        ({"ici_context_parallelism": 2, "ici_fsdp_parallelism": 2}, "has 8 tokens of a"),
    ],
)
def test_splash_attention_is_refused_where_it_does_not_run(settings, message):
    with pytest.raises(ValueError, match=message):
        set_up(config_of(CIRCULAR, {"attention": "splash"}, settings), jax.devices())


@pytest.mark.parametrize("kernel", ["cudnn", "pallas"])
def test_attention_for_gpus_is_refused_elsewhere(kernel):
    message = f"`attention` is '{kernel}', but the devices are cpus, not GPUs"
    with pytest.raises(ValueError, match=message):
        set_up(config_of(CIRCULAR, {"attention": kernel}), jax.devices())


H100 = {
    "wanted": "auto",
    "platform": "gpu",
    "length": 2048,
    "packed": True,
    "dtype": "bfloat16",
    "head_dim": 128,
    "context_size": 1,
}


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({}, "cudnn"),
        ({"head_dim": 192}, "pallas"),
        ({"head_dim": 192, "length": 1000}, "dot_product"),
        ({"dtype": "float32"}, "dot_product"),
        ({"context_size": 2}, "cudnn"),
        ({"context_size": 2, "head_dim": 192}, "dot_product"),
        ({"scores": Scores(soft_cap=50.0)}, "dot_product"),
        ({"scores": Scores(window=100)}, "cudnn"),
        ({"wanted": "dot_product"}, "dot_product"),
        ({"wanted": "pallas"}, "pallas"),
        ({"platform": "cpu"}, "dot_product"),
    ],
    ids=str,
)
def test_attention_on_gpus_is_the_first_kernel_that_can_run(changes, kernel):
    assert AttentionPlan(**H100 | changes).kernel == kernel
