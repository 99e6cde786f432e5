"""Every key of a run changes a plan, is refused, or has a reason why it does not change it."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

import pytest

import jaxpipe as jp
from jaxpipe.autodiff.backward import TENSORS
from jaxpipe.models import PRESETS
from jaxpipe.train import Config, load_config

LLAMA: dict[str, Any] = {
    "model_name": "llama2-7b",
    "pipeline_engine": "circular",
    "ici_pipeline_parallelism": 2,
    "ici_fsdp_parallelism": 2,
    "num_pipeline_microbatches": 8,
    "remat_policy": "full",
}
EXPERTS: dict[str, Any] = {
    "model_name": "deepseek2-16b",
    "pipeline_engine": "none",
    "ici_pipeline_parallelism": 1,
    "ici_expert_parallelism": 4,
    "remat_policy": "full",
}

# What a run does around its steps: files, logs, data, seeds and devices that a plan is told.
AROUND = (
    "run_name",
    "output_dir",
    "steps",
    "log_period",
    "max_minutes",
    "init_weights_seed",
    "init_from",
    "dropout_seed",
    "data_files",
    "text_separator",
    "text_field",
    "token_dtype",
    "token_eod",
    "data_sources",
    "tokenizer_path",
    "enable_data_shuffling",
    "data_shuffle_seed",
    "eval_files",
    "eval_data_sources",
    "eval_split_fraction",
    "eval_split_seed",
    "eval_interval",
    "eval_steps",
    "keep_best",
    "sample_prompt",
    "sample_max_tokens",
    "sample_temperature",
    "debug_sharding",
    "compile_xla_flags",
    "emulate_devices",
    "distributed",
    "step_timeout_minutes",
    "mpmd_timeout_seconds",
    "mpmd_trace_step",
    "enable_checkpointing",
    "checkpoint_period",
    "checkpoint_minutes",
    "async_checkpointing",
    "max_to_keep",
    "begin_anew",
    "allow_unverified",
    "allow_data_change",
    "allow_learning_rate_change",
    "enable_tensorboard",
    "enable_wandb",
    "trackers",
    "tracker_project",
    "profile_steps",
    "peak_tflops_per_device",
    "enable_progress_bar",
    "jax_cache_dir",
    "bad_step_policy",
)

# Keys that change a program and no plan, with the reason.
UNCOUNTED = {
    **dict.fromkeys(
        ("learning_rate", "learning_rate_schedule", "learning_rate_schedule_steps"), "a scalar"
    ),
    **dict.fromkeys(("warmup_steps_fraction", "learning_rate_final_fraction"), "a scalar"),
    **dict.fromkeys(("adam_b1", "adam_b2", "adam_eps", "adam_weight_decay"), "a scalar"),
    **dict.fromkeys(("gradient_clipping_threshold", "max_gradient_norm"), "a sum of squares"),
    "weight_decay_exclude": "a mask that is known when a step is traced",
    "normalization_layer_epsilon": "a scalar",
    **dict.fromkeys(("rope_max_timescale", "rope_type", "llama31_rope_factor"), "other angles"),
    **dict.fromkeys(("local_rope_max_timescale", "rope_linear_scaling_factor"), "other angles"),
    "query_pre_attn_scalar": "a scalar",
    **dict.fromkeys(("rope_factor", "original_max_position_embeddings"), "other angles"),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale"), "other angles"),
    "temperature_tuning": "a factor of queries",
    **dict.fromkeys(
        ("chunk_attn_window_size", "nope_layer_interval"),
        "chunks are documents, for which kernels skip nothing",
    ),
    **dict.fromkeys(("dataset_type", "packing"), "a mask, which cuDNN alone reads: the last test"),
    "z_loss_multiplier": "one more number of each token",
    **dict.fromkeys(
        ("dropout_rate", "enable_dropout"),
        "drawing them is 1.3% of a step (llama2-7b, fsdp 4, v5p), less than a plan is sure of",
    ),
    **dict.fromkeys(("scan_pipeline_iterations", "scan_pipeline_repeats"), "the same ticks"),
    "scan_layers_per_stage": "only memory, where gathers over a torus of three dims take two steps",
    "shard_mode": "the same collectives",
    "deterministic": "other orders of additions",
    **dict.fromkeys(("enable_nnx", "pure_nnx_decoder"), "the same program"),
    **dict.fromkeys(("routed_score_func", "routed_bias_update_rate"), "numbers of a router"),
    **dict.fromkeys(("routed_scaling_factor", "norm_topk_prob"), "numbers of a router"),
    **dict.fromkeys(("n_routing_groups", "topk_routing_group"), "numbers of a router"),
    **dict.fromkeys(("group_score_experts", "load_balance_loss_weight"), "numbers of a router"),
    "mlpwo": "no backward reads it, and the input of the next layer is saved as well",
    "megablox": "which kernel a grouped product has",
    "logical_axis_rules": "where weights lie: tests/planner/test_plan_memory.py",
    "pipeline_layout": "a layout that is given: tests/planner/test_plan.py",
}

# Keys whose other value is not twice, or the opposite of, the one that they have.
OTHERS: dict[str, Any] = {
    "model_name": "llama3-8b",
    "num_vocab_tiling": 1,
    "interleave_moe_layer_step": 4,
    "base_num_query_heads": 64,
    "base_num_kv_heads": 8,
    "adam_b1": 0.5,
    "adam_b2": 0.5,
    "optimizer": "sgd",
    "optimizer_arguments": {"momentum": 0.9},
    "attention": "dot_product",
    "dtype": "float32",
    "weight_dtype": "bfloat16",
    "quantization": "fp8",
    "remat_policy": "minimal",
    "pipeline_engine": "scheduled",
    "pipeline_schedule": "1f1b",
    "num_pipeline_repeats": 4,
    "num_experts_per_tok": 4,
    "v_head_dim": 64,
    "qk_nope_head_dim": 256,
    "learning_rate_schedule": "constant",
    "weight_decay_exclude": ["norm"],
    "rope_type": "llama3.1",
    "routed_score_func": "sigmoid",
    "ici_data_parallelism": 2,
    "ici_pipeline_parallelism": 4,
    "ici_fsdp_parallelism": 1,
    "ici_expert_parallelism": 2,
    "megablox": False,
    "dropout_rate": 0.1,
    "num_pipeline_microbatches": 4,
    "base_moe_mlp_dim": 704,
    "num_experts": 32,
    "q_lora_rank": 1536,
}
# Layouts in which a key does something.
_SCHEDULED = {"pipeline_engine": "scheduled", "pipeline_schedule": "1f1b"}
_LLAMA4 = {
    "model_name": "llama4-maverick",
    "base_num_decoder_layers": 16,
    "num_experts": 4,
}
WITH: dict[str, dict[str, Any]] = {
    **{name: {"remat_policy": "custom"} for name in TENSORS},
    "decoder_layer_input": {
        "remat_policy": "custom",
        "num_layers_per_pipeline_stage": 4,
        "set_remat_policy_on_layers_per_stage": False,
    },
    "sequence_parallel": {
        "ici_fsdp_parallelism": 1,
        "ici_tensor_parallelism": 2,
        "sequence_parallel": False,
    },
    "num_vocab_tiling": {
        "pipeline_engine": "scheduled",
        "pipeline_schedule": "1f1b",
        "pipeline_vocab_parallel": False,
    },
    "optimizer_arguments": {"optimizer": "sgd"},
    "llama31_rope_factor": {"rope_type": "llama3.1"},
    "routed_bias_update_rate": {"routed_bias": True},
    **{
        f"set_remat_policy_on_{scope}": {"pipeline_engine": "circular"}
        for scope in ("pipeline_iterations", "layers_per_stage")
    },
    **{f"sliding_window_{name}": {"model_name": "gemma3-1b"} for name in ("size", "pattern")},
    "local_rope_max_timescale": {"model_name": "gemma3-1b"},
    "rope_linear_scaling_factor": {"model_name": "gemma3-1b"},
    "query_pre_attn_scalar": {"model_name": "gemma3-1b"},
    "temperature_tuning": _LLAMA4,
    "chunk_attn_window_size": _LLAMA4,
    "nope_layer_interval": _LLAMA4,
    "interleave_moe_layer_step": _LLAMA4,
    "topk_routing_group": {"n_routing_groups": 4},
    "group_score_experts": {"n_routing_groups": 4, "topk_routing_group": 2},
    "num_pipeline_slices": {
        "pipeline_engine": "scheduled",
        "pipeline_schedule": "seq1f1b",
        "num_pipeline_slices": 4,
    },
    **{
        f"ici_{axis}_parallelism": {"ici_fsdp_parallelism": -1}
        for axis in ("data", "pipeline", "tensor", "context")
    },
    "mlpwo": {"remat_policy": "custom"},
    "mla_q": {"remat_policy": "custom", "q_lora_rank": 1536},
    "pipeline_fsdp_ag_per_repeat": {
        "num_pipeline_repeats": 4,
        "pipeline_fsdp_ag_per_repeat": False,
    },
    "shard_optimizer_over_data": {
        "ici_fsdp_parallelism": 1,
        "ici_data_parallelism": 2,
        "shard_optimizer_over_data": False,
    },
    "reduce_dtype": _SCHEDULED | {"pipeline_fsdp_ag_once": True},
    "pipeline_vocab_parallel": _SCHEDULED | {"pipeline_vocab_parallel": False},
    "pipeline_schedule": {"pipeline_engine": "scheduled", "pipeline_schedule": "zero_bubble_h1"},
    "pipeline_fsdp_ag_once": {"pipeline_fsdp_ag_per_layer": True},
    # Layers of longer stages gather their own without it.
    "pipeline_fsdp_ag_per_layer": {"num_pipeline_repeats": 16},
    "gradient_accumulation_steps": {"num_pipeline_microbatches": 4},
    "num_layers_per_pipeline_stage": {"num_layers_per_pipeline_stage": 4},
    # A slice of 1,032 rows is no whole number of tiles.
    "shard_exp_on_fsdp": {
        "base_emb_dim": 2064,
        "ici_expert_parallelism": 1,
        "ici_fsdp_parallelism": 2,
        "shard_exp_on_fsdp": False,
    },
}


DEFAULTS = load_config([], [], presets=PRESETS).model_dump()


# Keys that a plan for one slice of TPUs only refuses, and what it says.
REFUSED = {
    "quantization": "the planner knows neither time nor memory of its products",
    **{key: "and `num_slices` 1" for key in Config.model_fields if key.startswith("dcn_")},
}


def answer(keys: dict[str, Any], *batch: int) -> tuple[float, float] | str:
    """The memory and the time of the plan, or why there is none."""
    return _answer(json.dumps(keys), *batch)


@cache
def _answer(keys: str, *batch: int) -> tuple[float, float] | str:
    try:
        best = jp.plan(json.loads(keys), "v5p-8", *batch).best
    except ValueError as error:
        return str(error)
    return best.memory.total, best.time.seconds


def other(key: str, value: Any) -> Any:
    if OTHERS.get(key, value) != value:
        return OTHERS[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 2 * value if value > 0 else 2
    names = get_args(Config.model_fields[key].annotation)
    return next(name for name in names if isinstance(name, str) and name != value)


def answers(key: str) -> Iterator[tuple[Any, Any]]:
    """Answers without and with another value of `key`, for a dense model and one of experts."""
    for model in (LLAMA, EXPERTS):
        keys = model | WITH.get(key, {})
        value = other(key, (DEFAULTS | PRESETS[model["model_name"]] | keys)[key])
        # The number of rows of a batch stands in the keys where it is not an argument.
        batch = () if key in ("per_device_batch_size", "max_target_length") else (48, 2048)
        yield answer(keys, *batch), answer(keys | {key: value}, *batch)


# `decoder_block` is what its preset says: with another one all sizes are of another model, as is
# `use_qk_norm`, which it decides. tests/planner/test_plan_models.py counts what both change.
PRESET = ("decoder_block", "use_qk_norm")
COUNTED = [key for key in Config.model_fields if key not in {*AROUND, *UNCOUNTED, *PRESET}]


@pytest.mark.parametrize("key", COUNTED)
def test_a_key_of_a_step_changes_the_plan_or_is_refused(key: str):
    if key in REFUSED:
        assert all(REFUSED[key] in after for _, after in answers(key))
        return
    # One of the models may have no such key.
    assert any(b != a for b, a in answers(key) if not (isinstance(a, str) or isinstance(b, str)))


def test_keys_that_change_no_plan_are_keys_and_in_one_list():
    names = [*AROUND, *UNCOUNTED]
    assert len({*names}) == len(names) and {*names} <= {*Config.model_fields}


OF_DATA = ("dataset_type", "packing")  # of which the last test is
NNX = {"enable_nnx": True, "pure_nnx_decoder": True}  # neither is accepted alone


def test_keys_with_a_reason_change_no_plan():
    assert answer(LLAMA | NNX, 48, 2048) == answer(LLAMA, 48, 2048)
    for key, reason in UNCOUNTED.items():
        if key in ("logical_axis_rules", "pipeline_layout", "megablox", *OF_DATA, *NNX):
            continue
        found = [pair for pair in answers(key) if not isinstance(pair[1], str)]
        assert found and all(before == after for before, after in found), f"{key}: {reason}"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"max_target_length": 4096}, "`sequence` is 2048 and `max_target_length` 4096"),
        ({"per_device_batch_size": 2}, "`batch` is 48, and `per_device_batch_size` = 2 makes 8"),
        ({"dcn_data_parallelism": 2}, "`dcn_data_parallelism` is 2, and `num_slices` 1"),
    ],
)
def test_sizes_that_contradict_the_request_are_refused(keys: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        jp.plan(LLAMA | keys, "v5p-8", 48, 2048)
    assert jp.plan(LLAMA | {"per_device_batch_size": 12}, "v5p-8", 48, 2048).best


def test_rows_of_several_documents_cost_cudnn_the_whole_square():
    """On an H200 a forward with its backward took 2.1 times as long with a mask of documents."""
    keys: dict[str, Any] = {"ici_fsdp_parallelism": 8, "pipeline_engine": "none"}
    text = keys | {"dataset_type": "text", "data_files": ["x.txt"], "tokenizer_path": "x.json"}

    def products(keys: dict[str, Any]) -> float:
        return jp.plan("llama3-8b", "h200:8", 8, 32768, **keys).best.time.parts["products"]

    plain, packed = products(keys), products(text)
    assert products(text | {"packing": False}) == plain
    assert 1.1 * plain < packed < 2 * plain


def test_cudnn_has_heads_of_256_channels_from_hopper_on():
    """Whatever the machine that plans: without, the local layers of a gemma store scores."""

    def memory(devices: str) -> float:
        keys: dict[str, Any] = {"pipeline_engine": "none", "remat_policy": "full"}
        keys |= {"ici_fsdp_parallelism": 8, "num_pipeline_microbatches": 1}
        return jp.plan("gemma3-1b", devices, 64, 4096, **keys).best.memory.total

    assert memory("h100:8") < memory("a100:8")


@pytest.mark.parametrize("devices", ["v5p-8", "v4-8", "h100:4"])
def test_sums_in_bfloat16_take_less_time(devices: str):
    def seconds(dtype: str, **axes: int) -> dict[str, float]:
        given = {f"ici_{axis}_parallelism": size for axis, size in axes.items()}
        given |= {"model_name": "llama2-7b", "pipeline_engine": "scheduled", "reduce_dtype": dtype}
        given |= {"pipeline_schedule": "1f1b", "num_pipeline_microbatches": 8}
        given |= {"remat_policy": "full", "pipeline_fsdp_ag_once": axes["fsdp"] > 1}
        return jp.plan(given, devices, 16, 512, memory_gb=200).best.time.parts

    exact, rounded = (seconds(x, pipeline=2, data=2, fsdp=1) for x in ("float32", "bfloat16"))
    if "h100" not in devices:  # where it is hidden
        assert 0.4 < rounded["gradient_reduction"] / exact["gradient_reduction"] < 0.9
    exact, rounded = (seconds(x, pipeline=2, data=1, fsdp=2) for x in ("float32", "bfloat16"))
    assert 0.6 < rounded["fsdp"] / exact["fsdp"] < 0.8  # gathers are as before
