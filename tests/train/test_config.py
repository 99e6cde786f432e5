import pytest
from pydantic import ValidationError

from jaxpipe.train import Config


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


def test_query_heads_must_share_key_value_heads_evenly():
    with pytest.raises(ValueError, match=r"`base_num_query_heads` is 4, not a multiple of .* = 3"):
        Config(base_num_query_heads=4, base_num_kv_heads=3)


def test_head_dim_must_be_even():
    with pytest.raises(ValueError, match=r"`head_dim` is 15\. Rotary embeddings turn pairs"):
        Config(head_dim=15)


def test_no_engine_and_a_pipeline_axis_contradict_each_other():
    with pytest.raises(ValueError, match="'none' with `ici_pipeline_parallelism` = 2"):
        Config(pipeline_engine="none", ici_pipeline_parallelism=2)


def test_text_needs_files():
    with pytest.raises(ValueError, match="`text_files` is empty"):
        Config(dataset_type="text", text_files=())
