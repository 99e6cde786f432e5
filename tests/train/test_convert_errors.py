"""What is wrong with a folder is said before a weight is read, with file and tensor."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpipe.hugging_face import from_hugging_face, to_hugging_face

from .converted import DEEPSEEK, GOLDEN, LLAMA, change, make_run

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def copy(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / name, tmp_path / "theirs"))


def refusal(folder: Path) -> str:
    """The message, without which nothing is left behind."""
    before = {*folder.parent.iterdir()}
    with pytest.raises(ValueError) as error:
        from_hugging_face(folder, folder.parent / "ours")
    assert {*folder.parent.iterdir()} == before
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "fields", "parts"),
    [
        ("llama2", {"foo": 3, "bar": "x"}, ("`foo` is 3: unknown", "`bar` is 'x': unknown")),
        ("llama2", {"quantization_config": {"bits": 4}}, ("`quantization_config` is {'bits': 4}",)),
        (
            "llama2",
            {"attention_bias": True},
            ("`attention_bias` is True: only False is supported",),
        ),
        ("llama2", {"hidden_act": "gelu"}, ("`hidden_act` is 'gelu': only 'silu'",)),
        ("llama2", {"hidden_size": None}, ("`hidden_size` is missing",)),
        ("llama2", {"hidden_size": "32"}, ("`base_emb_dim` would be '32', which is no int",)),
        ("llama2", {"vocab_size": -1}, ("`vocab_size` is -1 (from ", "It should be ")),
        (
            "llama2",
            {"model_type": "mamba"},
            ("`model_type` is 'mamba': only llama, mistral, qwen3, ",),
        ),
        (
            "llama2",
            {"num_key_value_heads": 3},
            ("is 4, not a multiple of `base_num_kv_heads` = 3",),
        ),
        (
            "llama2",
            {"rope_parameters": {"rope_type": "longrope"}},
            ("`rope_parameters.rope_type` is 'longrope': only default, llama3 are supported",),
        ),
        (
            "llama2",
            {"rope_parameters": None, "rope_scaling": {"type": "llama3", "factor": 8.0, "a": 1}},
            ("`rope_scaling.a` is 1: unknown", "`rope_scaling.low_freq_factor` is missing"),
        ),
        (
            "llama3",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 4096,
                }
            },
            ("`original_max_position_embeddings` of rotary positions is 4096: only 8192",),
        ),
        # A null is removed here, and stands for 4096 if it is missing.
        ("mistral", {"use_cache": True}, ("`sliding_window` is 4096: only None is supported",)),
        ("qwen3", {"use_sliding_window": True}, ("`use_sliding_window` is True: only False",)),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"]},
            ("`layer_types` has 'sliding_attention': only 'full_attention'",),
        ),
        ("qwen3", {"head_dim": None}, ("`head_dim` is missing",)),
        (
            "gemma3",
            {"layer_types": ["full_attention", "sliding_attention"] * 2},
            ("`layer_types` is ['full_attention', 'sliding_attention', 'full_attention', 'slidi",),
        ),
        ("gemma3", {"final_logit_softcapping": 30.0}, ("`final_logit_softcapping` is 30.0: only",)),
        ("gemma3", {"use_bidirectional_attention": True}, ("attention` is True: only False or",)),
        ("gemma3", {"hidden_activation": "gelu"}, ("is 'gelu': only 'gelu_pytorch_tanh' is",)),
        (
            "gemma3",
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
            ("`rope_parameters` is {'factor': 4.0, 'rope_type': 'linear'}: only an object with",),
        ),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            ("`rope_parameters.rope_type` is 'yarn': only default, linear are supported",),
        ),
        ("gemma3", {"model_type": "gemma3"}, ("`model_type` is 'gemma3': only llama, mistral, ",)),
        (
            "gpt_oss",
            {"layer_types": ["full_attention", "sliding_attention"]},
            ("`layer_types` is ['full_attention', 'sliding_attention']: only sliding_attention",),
        ),
        ("gpt_oss", {"layer_types": ["sliding_attention"]}, ("has 1 entries for 2 layers",)),
        ("gpt_oss", {"swiglu_limit": 5.0}, ("`swiglu_limit` is 5.0: only 7.0 is supported",)),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, ("config` is {'quant",)),
        (
            "gpt_oss",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            ("`rope_parameters.truncate` is True: only False is supported",),
        ),
        (
            "gpt_oss",
            {"rope_parameters": {"type": "yarn", "factor": 4.0}},
            ("`rope_parameters.truncate` is True: only False is supported",),
        ),
        ("gpt_oss", {"layer_types": 5}, ("`layer_types` is 5: only sliding_attention and",)),
        (
            "llama4",
            {"attn_temperature_tuning": "false"},
            ("`temperature_tuning` would be",),
        ),
        ("gpt_oss", {"rope_parameters": {"rope_type": "default"}}, ("only yarn are supported",)),
        ("llama4", {"moe_layers": [0, 2]}, ("`moe_layers` is [0, 2]: only what `interleave_moe",)),
        ("llama4", {"no_rope_layers": [1] * 4}, ("`no_rope_layers` is [1, 1, 1, 1]: only what",)),
        ("llama4", {"floor_scale": 4096}, ("`floor_scale` is 4096: only 8192 is supported",)),
        (
            "llama4",
            {"rope_parameters": {"rope_type": "llama3"}},
            ("`rope_parameters.rope_type` is 'llama3': only default are supported",),
        ),
        ("mixtral", {"router_jitter_noise": 0.1}, ("`router_jitter_noise` is 0.1: only 0.0",)),
        ("qwen3_moe", {"mlp_only_layers": [0]}, ("`mlp_only_layers` is [0]: only [] is supp",)),
        ("qwen3_moe", {"decoder_sparse_step": 2}, ("`decoder_sparse_step` is 2: only 1",)),
        ("deepseek_v2", {"norm_topk_prob": True}, ("`norm_topk_prob` is True: only False",)),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, ("`scoring_func` is 'sigmoid': only 'soft",)),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, ("`topk_method` is 'noaux_tc'",)),
        ("deepseek_v2", {"moe_layer_freq": 2}, ("`moe_layer_freq` is 2: only 1 is supported",)),
        ("deepseek_v2", {"first_k_dense_replace": 2}, ("`first_num_dense_layers` is 2 of",)),
        ("deepseek_v3", {"rope_interleave": False}, ("`rope_interleave` is False: only True",)),
    ],
)
def test_fields_that_are_not_understood_are_named(
    name: str, fields: dict[str, Any], parts: tuple[str, ...], tmp_path: Path
):
    folder = copy(name, tmp_path)
    change(folder / "config.json", **fields)
    (folder / FILE).unlink()  # nothing else has been looked at
    message = refusal(folder)
    assert str(folder / "config.json") in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mscale": 1.0}, "is 1.0 and `mscale_all_dim` 0.707: only equal ones"),
        # transformers reads 0 as missing, and then has another formula.
        ({"mscale": 0, "mscale_all_dim": 0}, "`rope_parameters.mscale` is 0: only numbers above 0"),
        ({"beta_fast": 1, "beta_slow": 32}, "`beta_fast` is 1 and `beta_slow` 32"),
        ({"factor": 0.5}, "`rope_factor` is 0.5"),
    ],
)
def test_rotary_positions_that_would_be_others_are_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
):
    folder = copy("deepseek_v2", tmp_path)
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    change(folder / "config.json", rope_parameters=rope | fields)
    assert message in refusal(folder)


def test_two_fields_of_rotary_positions_that_differ_are_refused(tmp_path: Path):
    folder = copy("deepseek_v2", tmp_path)
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    change(folder / "config.json", rope_scaling=rope | {"factor": 2 * rope["factor"]})
    assert "only one of them, or equal ones" in refusal(folder)


def test_old_and_new_names_of_rotary_fields_mean_the_same(tmp_path: Path):
    folder = copy("deepseek_v2", tmp_path)
    from_hugging_face(folder, tmp_path / "new")
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    base, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    scaling = rope | {"type": kind}
    change(folder / "config.json", rope_parameters=None, rope_theta=base, rope_scaling=scaling)
    from_hugging_face(folder, tmp_path / "old")
    assert (tmp_path / "old/config.yml").read_text() == (tmp_path / "new/config.yml").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config.json is missing"),
        ("{", "config.json is not JSON"),
        ("[]", "not a JSON object"),
    ],
)
def test_a_config_that_cannot_be_read_is_named(text: str | None, message: str, tmp_path: Path):
    folder = copy("llama2", tmp_path)
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    assert message in refusal(folder)


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    """The header, and the bytes of the tensors."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write(file: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "I9"},
        {"shape": [31]},
        {"shape": [-32]},
        {"shape": "32"},
        {"data_offsets": [0]},
        {"data_offsets": [0, 64]},
        {"data_offsets": [2**40, 2**40 + 64]},
    ],
)
def test_a_corrupt_header_is_refused_with_its_file(entry: dict[str, Any], tmp_path: Path):
    file = copy("llama2", tmp_path) / FILE
    header, data = header_of(file)
    header[NORM] |= entry
    write(file, header, data)
    found = refusal(file.parent)
    assert f"{file} cannot be read: " in found and "copy it again" in found


def test_tensors_of_other_dtypes_are_refused_by_name(tmp_path: Path):
    file = copy("llama2", tmp_path) / FILE
    save_file(load_file(file) | {NORM: np.zeros(32, np.int8)}, file)
    assert f"{file}: tensor {NORM} is stored as I8. Only F32, BF16, F16" in refusal(file.parent)


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_file_that_is_cut_off_is_refused(size: int, tmp_path: Path):
    file = copy("llama2", tmp_path) / FILE
    file.write_bytes(file.read_bytes()[:size])
    found = refusal(file.parent)
    assert f"{file} cannot be read: " in found and "It is cut off" in found


@pytest.mark.parametrize("text", [b"{]", b"[]", b"\xff\xfe{}"])
def test_a_header_that_is_no_object_is_refused(text: bytes, tmp_path: Path):
    file = copy("llama2", tmp_path) / FILE
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    assert f"{file} cannot be read: " in refusal(file.parent)


def test_tensors_that_are_missing_or_too_many_or_of_other_shapes_are_all_named(tmp_path: Path):
    folder = copy("llama2", tmp_path)
    tensors = load_file(folder / FILE)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
    tensors[NORM] = np.zeros(31, np.float32)
    save_file(tensors, folder / FILE)
    message = refusal(folder)
    assert f"{folder}: tensor model.layers.1.mlp.up_proj.weight is missing" in message
    extra = "tensor model.layers.2.mlp.up_proj.weight is not in the model of config.json"
    assert f"{folder / FILE}: {extra}" in message
    assert (
        f"{folder / FILE}: tensor {NORM} is [31], and the model of config.json has [32]" in message
    )


def test_many_wrong_tensors_are_listed_up_to_a_few(tmp_path: Path):
    folder = copy("llama2", tmp_path)
    change(folder / "config.json", num_hidden_layers=4)
    assert refusal(folder).endswith("is missing\n  and 10 more")


def test_no_safetensors_at_all_is_said(tmp_path: Path):
    folder = copy("llama2", tmp_path)
    (folder / FILE).rename(folder / "pytorch_model.bin")
    assert f"has neither {FILE} nor {INDEX}. Weights in other formats" in refusal(folder)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make_run(tmp_path / "run", LLAMA)
    to_hugging_face(tmp_path / "run", tmp_path / "theirs", max_shard_bytes=6_000)
    return tmp_path / "theirs"


def test_a_missing_shard_is_named_with_a_tensor_of_it(sharded: Path):
    file = min(sharded.glob("model-*"))
    file.unlink()
    assert f"{INDEX} has tensor lm_head.weight in {file.name}, which is missing" in refusal(sharded)


def test_an_index_that_is_not_that_of_its_files_is_refused(sharded: Path):
    index = json.loads((sharded / INDEX).read_text())
    first, last = min(sharded.glob("model-*")), max(sharded.glob("model-*"))
    moved = {**index["weight_map"], "lm_head.weight": last.name}
    change(sharded / INDEX, weight_map=moved)
    assert f"{first}: tensor lm_head.weight is not there in the index" in refusal(sharded)
    change(sharded / INDEX, weight_map={**index["weight_map"], "more": last.name})
    assert f"{last}: tensor more is missing, and in the index" in refusal(sharded)
    for wrong in (None, 3, {"lm_head.weight": "../model.safetensors"}):
        change(sharded / INDEX, weight_map=wrong)
        assert "has no `weight_map` from tensors to files beside it" in refusal(sharded)


def test_a_head_beside_a_tied_embedding_must_be_the_same(tmp_path: Path):
    folder = copy("llama3", tmp_path)
    tensors = load_file(folder / FILE)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, folder / FILE)
    from_hugging_face(folder, tmp_path / "same")
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] * 2}, folder / FILE
    )
    assert "tensor lm_head.weight is not model.embed_tokens.weight" in refusal(folder)


def test_buffers_that_old_versions_saved_are_left_out(tmp_path: Path):
    folder = copy("llama2", tmp_path)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    save_file({**load_file(folder / FILE), **buffer}, folder / FILE)
    assert from_hugging_face(folder, tmp_path / "ours").num_tensors == 21


def test_what_is_there_already_is_not_written_into(tmp_path: Path):
    folder = copy("llama2", tmp_path)
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "mine").write_text("")
    assert "ours is there already. Give another folder" in refusal(folder)
    (tmp_path / "ours" / "mine").unlink()
    from_hugging_face(folder, tmp_path / "ours")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"norm_topk_prob": True}, "`norm_topk_prob` is True, and `routed_score_func` 'softmax'"),
        ({"routed_bias": True}, "`routed_bias` is True"),
        ({"n_routing_groups": 2}, "`group_score_experts` is 2"),
        ({"shared_experts": 0}, "`shared_experts` is 0"),
        ({"routed_score_func": "sigmoid"}, "`routed_bias` is False, and `routed_score_func` 'sigm"),
    ],
)
def test_a_model_that_hugging_face_does_not_have_is_refused(
    sizes: dict[str, Any], message: str, tmp_path: Path
):
    make_run(tmp_path / "run", dataclasses.replace(DEEPSEEK, **sizes))
    with pytest.raises(ValueError) as error:
        to_hugging_face(tmp_path / "run", tmp_path / "theirs")
    assert message in str(error.value)
    assert str(error.value).endswith("Hugging Face has no such model.")
    assert not (tmp_path / "theirs").exists()


def test_a_family_without_a_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_run(tmp_path / "run", DEEPSEEK)
    monkeypatch.setattr("jaxpipe.hugging_face.formats._models.MODEL_FORMATS", {})
    with pytest.raises(ValueError, match="'deepseek', which Hugging Face does not have"):
        to_hugging_face(tmp_path / "run", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()
