"""Keys that only MaxText has: `jaxpipe train` says what to write instead."""

import re

import pytest

from jaxpipe import sharding
from jaxpipe.train import Config, load_config
from jaxpipe.train.config._load import parse_override
from jaxpipe.train.config._maxtext_keys import INSTEAD, PREFIXES, instead_of

PRESETS = {"llama-tiny": {}}
SAMPLES = (
    "ici_fsdp_transpose_parallelism",
    "dcn_context_autoregressive_parallelism",
    "ici_diloco_parallelism",
    "grain_train_files",
    "hf_path",
    "dump_hlo_local_dir",
    "muon_beta",
    "wi_tile_fwd_embed_dim",
    "checkpoint_storage_use_ocdbt",
    "weight_quantization_calibration_method",
)


def refusal(key: str) -> str:
    with pytest.raises(ValueError) as caught:
        load_config([], [f"{key}=1"], presets=PRESETS)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("scan_layers", "Layers are always stacked: leave it out. `scan_layers_per_stage`"),
        ("compile_topology", "Run `jaxpipe compile --topology v5p:2x2x1 KEY=...`."),
        ("base_output_directory", "Write `output_dir=FOLDER`"),
        ("capacity_factor", "Experts here drop no tokens"),
        ("dcn_sequence_parallelism", "Write `dcn_context_parallelism`"),
    ],
)
def test_a_key_of_maxtext_is_refused_with_what_to_write_instead(key, advice):
    start = f"the command line sets `{key}`, which is no key. MaxText has it. "
    assert refusal(key).startswith(start + advice)


def test_no_key_is_both_refused_and_there():
    assert not [key for key in Config.model_fields if instead_of(key)]


def test_every_pattern_and_no_other_key_has_advice():
    for pattern in PREFIXES:
        assert any(re.fullmatch(pattern, sample) for sample in SAMPLES), pattern
    assert all(instead_of(sample) for sample in SAMPLES)
    assert instead_of("stepz") is None
    assert "Did you mean `steps`?" in refusal("stepz")


def test_what_to_write_instead_names_keys_that_there_are():
    for key in [*INSTEAD, *SAMPLES]:
        for code in re.findall(r"`([^`]*)`", instead_of(key) or ""):
            if code.startswith("jaxpipe ") or not re.match(r"[a-z_0-9]+(=|$)", code):
                continue
            for part in code.split():
                name = part.split("=")[0]
                assert name in Config.model_fields, f"{key}: {name}"


def test_the_rules_of_maxtexts_large_moe_preset_are_accepted():
    (text,) = re.findall(r"`(logical_axis_rules=.*?)`", INSTEAD["custom_mesh_and_rule"])
    config = load_config([], [text], presets=PRESETS)
    rules_given = parse_rules(text)
    assert config.logical_axis_rules == rules_given
    rules = dict(sharding.with_rules(rules_given))
    assert rules["q_lora"] == rules["kv_lora"] == rules["embed_no_exp"] == ("fsdp",)
    assert rules["embed"] == ("fsdp", "expert") and rules["mlp"] == ("tensor",)


def parse_rules(text: str) -> tuple:
    pairs = parse_override(text)["logical_axis_rules"]
    return tuple((name, tuple(axes)) for name, axes in pairs)
