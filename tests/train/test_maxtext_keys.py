"""Keys that only MaxText has: `jaxpipe train` says what to write instead."""

import re
from pathlib import Path

import pytest

from jaxpipe import sharding
from jaxpipe.train import Config, load_config
from jaxpipe.train.config import (
    ADVICE,
    ADVICE_BY_PATTERN,
    SAME_KEYS,
    maxtext_advice,
    parse_override,
)

PRESETS = {"llama-tiny": {}}
THEIRS = Path(__file__).with_name("maxtext_keys.txt").read_text().split()
"""All keys of base.yml of MaxText 0.2.5."""
SHARED = set(THEIRS).intersection([*Config.model_fields, *SAME_KEYS])
"""Those that are keys here too."""


def refusal(key: str) -> str:
    with pytest.raises(ValueError) as caught:
        load_config([], [f"{key}=1"], presets=PRESETS)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("scan_layers", "Layers are always stacked: leave it out. `scan_layers_per_stage`"),
        ("compile_topology", "Run `jaxpipe compile --devices v5p:2x2x1 KEY=...`."),
        ("capacity_factor", "Experts here drop no tokens"),
        ("dcn_sequence_parallelism", "Write `dcn_context_parallelism`"),
        ("eval_local_sa_block_q", "`attention=splash` chooses its own blocks"),
        ("num_attention_heads_for_vit", "Models read text alone: leave it out."),
        ("abort_on_nan_loss", "Write `bad_step_policy=stop`, which is the default, or `bad_step"),
        ("save_checkpoint_on_completion", "With `enable_checkpointing` the last step is always"),
        ("eval_per_device_batch_size", "A batch of evaluation has as many rows as a step"),
        ("mlp_activations", "MLPs are `silu(gate) * linear`, which is [silu, linear]"),
        ("use_iota_embed", "The embedding is looked up by index, not multiplied: leave it out."),
    ],
)
def test_a_key_of_maxtext_is_refused_with_what_to_write_instead(key, advice):
    start = f"the command line sets `{key}`, which is no key. MaxText has it. "
    assert refusal(key).startswith(start + advice)


def test_a_key_with_another_name_here_means_the_same():
    config = load_config([], ["base_output_directory=there"], presets=PRESETS)
    assert str(config.output_dir) == "there"
    assert set(SAME_KEYS.values()) <= set(Config.model_fields)


def test_no_key_is_both_refused_and_there():
    assert not [key for key in Config.model_fields if maxtext_advice(key)]


def test_every_key_of_maxtexts_base_yml_is_a_key_here_or_has_advice():
    assert not [key for key in THEIRS if key not in SHARED and not maxtext_advice(key)]
    assert len(THEIRS) > 700 and len(SHARED) > 100


def test_no_advice_is_for_a_key_that_nobody_has():
    for pattern in ADVICE_BY_PATTERN:
        assert any(re.fullmatch(pattern, key) for key in THEIRS if key not in SHARED), pattern
    assert maxtext_advice("stepz") is None
    assert "Did you mean `steps`?" in refusal("stepz")


def test_what_to_write_instead_names_keys_that_there_are():
    for key in [*ADVICE, *THEIRS]:
        for code in re.findall(r"`([^`]*)`", maxtext_advice(key) or ""):
            if code.startswith("jaxpipe ") or not re.match(r"[a-z_0-9]+(=|$)", code):
                continue
            for part in code.split():
                name = part.split("=")[0]
                assert name in Config.model_fields, f"{key}: {name}"


def test_the_rules_of_maxtexts_large_moe_preset_are_accepted():
    (text,) = re.findall(r"`(logical_axis_rules=.*?)`", ADVICE["custom_mesh_and_rule"])
    config = load_config([], [text], presets=PRESETS)
    rules_given = parse_rules(text)
    assert config.logical_axis_rules == rules_given
    rules = dict(sharding.override_rules(rules_given))
    assert rules["q_lora"] == rules["kv_lora"] == rules["embed_no_exp"] == ("fsdp",)
    assert rules["embed"] == ("fsdp", "expert") and rules["mlp"] == ("tensor",)


def parse_rules(text: str) -> tuple:
    pairs = parse_override(text)["logical_axis_rules"]
    return tuple((name, tuple(axes)) for name, axes in pairs)
