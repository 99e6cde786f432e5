import re

import pytest
from pydantic import ValidationError

from jaxpipe.train import Config

from .runs import setup_of


def test_a_config_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Config().steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_lists_become_tuples_at_any_depth():
    config = Config.model_validate({"logical_axis_rules": [["embed", ["fsdp", "data"]]]})
    assert config.logical_axis_rules == (("embed", ("fsdp", "data")),)


@pytest.mark.parametrize(
    "key",
    ["steps", "base_emb_dim", "per_device_batch_size", "ici_fsdp_parallelism", "adam_eps"],
)
def test_zero_is_refused_where_it_makes_no_sense(key: str):
    with pytest.raises(ValidationError, match=key):
        Config.model_validate({key: 0})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ici_pipeline_parallelism", 2),
        ("dcn_pipeline_parallelism", 2),
        ("num_layers_per_pipeline_stage", 2),
        ("num_pipeline_repeats", 2),
        ("pipeline_delay_activation_forwarding", True),
        ("set_remat_policy_on_layers_per_stage", True),
    ],
)
def test_no_engine_and_a_setting_of_pipelines_contradict_each_other(name, value):
    with pytest.raises(ValueError, match=f"'none' and `{name}` is {value}, which it does not"):
        Config.model_validate({"pipeline_engine": "none", name: value})


def test_ranks_across_slices_are_the_outermost_ones():
    sizes = {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2}
    mesh = setup_of(8, sizes | {"dcn_pipeline_parallelism": 2}).mesh
    ids = [[device.id for device in rank] for rank in mesh.devices.reshape(4, 2)]
    assert ids == [[0, 1], [2, 3], [4, 5], [6, 7]]
    # Copies across slices, and the pipeline inside each.
    mesh = setup_of(8, sizes | {"dcn_data_parallelism": 2, "num_pipeline_microbatches": 2}).mesh
    ids = [[device.id for device in rank.flat] for rank in mesh.devices[1, :2]]
    assert ids == [[4, 5], [6, 7]]


def test_a_policy_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ValidationError, match="one of full, none, minimal_with_context, minimal"):
        Config(remat_policy="ful")


def test_places_of_tensors_without_the_policy_that_reads_them_are_refused():
    with pytest.raises(
        ValueError, match="`remat_policy` is 'full' and `mlpwo` is 'device', which it"
    ):
        Config(mlpwo="device")
    assert Config(mlpwo="device", remat_policy="custom").mlpwo == "device"


def test_text_needs_files():
    with pytest.raises(ValueError, match="`data_files` is empty"):
        Config(dataset_type="text", data_files=())


@pytest.mark.parametrize(
    ("keys", "without"),
    [
        (
            {"checkpoint_minutes": 9.0, "enable_checkpointing": False},
            {"enable_checkpointing": True},
        ),
        ({"packing": False}, {"dataset_type": "text"}),
        ({"enable_data_shuffling": False}, {"dataset_type": "text"}),
        (
            {"data_shuffle_seed": 3, "enable_data_shuffling": False, "dataset_type": "text"},
            {"enable_data_shuffling": True},
        ),
        ({"dropout_seed": 3}, {"dropout_rate": 0.1}),
        (
            {"dropout_seed": 3, "dropout_rate": 0.1, "enable_dropout": False},
            {"enable_dropout": True},
        ),
        ({"init_weights_seed": 3, "init_from": "a"}, {"init_from": ""}),
        (
            {"learning_rate_final_fraction": 0.5, "learning_rate_schedule": "constant"},
            {"learning_rate_schedule": "wsd"},
        ),
        ({"weight_decay_exclude": ("norm",), "adam_weight_decay": 0.0}, {"adam_weight_decay": 0.1}),
        ({"llama31_rope_factor": 4.0}, {"rope_type": "llama3.1"}),
        (
            {"max_gradient_norm": 1.0, "bad_step_policy": "ignore"},
            {"bad_step_policy": "skip"},
        ),
        ({"routed_bias_update_rate": 0.5}, {"routed_bias": True}),
        ({"group_score_experts": 1}, {"n_routing_groups": 2}),
        ({"mpmd_trace_step": 9, "pipeline_engine": "mpmd", "steps": 8}, {"steps": 9}),
        ({"profile_steps": "9:12", "steps": 8}, {"steps": 9}),
    ],
)
def test_a_key_that_nothing_reads_is_refused(keys: dict, without: dict):
    (name, value) = next(iter(keys.items()))
    with pytest.raises(ValueError, match=f"`{name}` is {re.escape(repr(value))} and .*reads it"):
        Config(**keys)
    Config(**keys | without)
