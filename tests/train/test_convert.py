"""Conversion there and back, and the logits of models that transformers has made."""

import dataclasses
import json
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from harness.contract import assert_close
from jaxpipe import models
from jaxpipe.hugging_face import from_hugging_face, to_hugging_face
from jaxpipe.train import Config, load_config, set_up
from jaxpipe.train.checkpoint import (
    first_state,
    open_checkpoints,
    read_metadata,
    restore_leaf,
    saved_leaf_specs,
)
from jaxpipe.train.step import make_eval_step, mesh_context, shard_batch
from small_models import small_gemma, small_gpt_oss, small_llama4, small_mixture

from .converted import DEEPSEEK, GOLDEN, LLAMA, NAMES, logits, make_run

pytestmark = pytest.mark.ci

V3 = dataclasses.replace(
    DEEPSEEK,
    routed_score_func="sigmoid",
    routed_bias=True,
    norm_topk_prob=True,
    n_routing_groups=2,
    q_lora_rank=6,
    rope_type="yarn",
)
TIED = dataclasses.replace(
    LLAMA, logits_via_embedding=True, rope_type="llama3.1", llama31_rope_factor=32.0
)
MIXTURE = small_mixture(use_qk_norm=True, norm_topk_prob=False, vocab_size=40)
GEMMA = small_gemma(base_num_decoder_layers=4, logits_via_embedding=True, vocab_size=40)
GPT_OSS = small_gpt_oss(base_num_decoder_layers=4, load_balance_loss_weight=0.0, vocab_size=40)
LLAMA4 = small_llama4(base_num_decoder_layers=8, load_balance_loss_weight=0.0, vocab_size=40)
NARROW = {"dtype": jnp.bfloat16}


def leaves(folder: Path, step: int) -> dict[str, np.ndarray]:
    """Every weight of a checkpoint."""
    with open_checkpoints(folder, max_to_keep=None, asynchronous=False) as checkpoints:
        names = saved_leaf_specs(checkpoints, step, "weights")
        return {name: restore_leaf(checkpoints, step, f"weights/{name}") for name in names}


def by_path(tree: Any) -> dict[str, np.ndarray]:
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in found}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        assert (found[name].dtype, found[name].shape) == (leaf.dtype, leaf.shape), name
        assert found[name].tobytes() == leaf.tobytes(), name


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path):
    from_hugging_face(GOLDEN / name, tmp_path / "ours")
    with np.load(GOLDEN / name / "expected.npz") as expected:
        tokens, theirs = expected["tokens"], expected["logits"]
    assert theirs.std() > 0.3
    assert_close(logits(tmp_path / "ours", tokens), theirs, name)


PIPELINES: dict[str, list[str]] = {
    "circular": [],
    "scheduled": ["pipeline_engine=scheduled", "pipeline_schedule=1f1b"],
    "mpmd": ["pipeline_engine=mpmd", "pipeline_schedule=1f1b"],
    "none": ["pipeline_engine=none", "ici_tensor_parallelism=2"],
}


@pytest.mark.parametrize(
    "engine",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "circular")) for name in PIPELINES],
)
@pytest.mark.parametrize(
    ("name", "layers_per_stage"), [("gemma3", 2), ("gpt_oss", 1), ("llama4", 1)]
)
def test_a_pipeline_whose_layers_differ_has_the_loss_of_transformers(
    name: str, layers_per_stage: int, engine: str, tmp_path: Path
):
    from_hugging_face(GOLDEN / name, tmp_path / "ours", dtype="float32")
    settings = [f"init_from={tmp_path / 'ours'}", "dtype=float32", "max_target_length=47"]
    settings += ["num_pipeline_microbatches=2", "per_device_batch_size=1.0", *PIPELINES[engine]]
    settings += ["ici_fsdp_parallelism=1"]
    if engine != "none":
        settings += ["ici_pipeline_parallelism=2"]
        settings += [f"num_layers_per_pipeline_stage={layers_per_stage}"]
    config = load_config([tmp_path / "ours" / "config.yml"], settings, presets=models.PRESETS)
    setup = set_up(config, jax.devices()[:2])
    with np.load(GOLDEN / name / "expected.npz") as expected:
        tokens, theirs = expected["tokens"], expected["logits"]
    ones = np.ones((2, 47), np.int32)
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": ones.cumsum(1, dtype=np.int32) - 1,
        "segment_ids": ones,
        "target_weights": (ones / ones.size).astype(np.float32),
    }
    weights = first_state(setup.step, config.init_from)["weights"]
    with mesh_context(setup.step):
        found = make_eval_step(setup.step)(weights, shard_batch(setup.batch, batch))
    likely = theirs[:, :-1] - np.log(np.exp(theirs[:, :-1]).sum(-1, keepdims=True))
    loss = -np.take_along_axis(likely, tokens[:, 1:, None], -1).mean()
    np.testing.assert_allclose(float(found["loss"]), loss, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_their_files_come_back_bit_for_bit(name: str, tmp_path: Path):
    from_hugging_face(GOLDEN / name, tmp_path / "ours")
    done = to_hugging_face(tmp_path / "ours", tmp_path / "theirs")
    # Read by the library of those who made the format.
    expected = load_file(GOLDEN / name / "model.safetensors")
    assert_same(load_file(tmp_path / "theirs" / "model.safetensors"), expected)
    assert (done.num_tensors, done.num_files, done.dtype) == (len(expected), 1, "bfloat16")
    kinds = [
        json.loads((folder / "config.json").read_text())["model_type"]
        for folder in (GOLDEN / name, tmp_path / "theirs")
    ]
    assert kinds[0] == kinds[1]
    with safe_open(tmp_path / "theirs" / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (LLAMA, {}),
        (TIED, NARROW),
        (dataclasses.replace(MIXTURE, load_balance_loss_weight=0.0), {"layers_after": 1}),
        (GEMMA, {"layers_after": 2}),
        (GPT_OSS, {"layers_after": 2}),
        (LLAMA4, {"layers_after": 1}),
        (DEEPSEEK, {"layers_after": 2}),
        (V3, NARROW),
        (V3, {}),
    ],
    ids=[
        *("llama", "tied, bfloat16", "experts", "windows", "sinks", "blocks"),
        *("V2, layers after", "V3, bfloat16", "V3"),
    ],
)
def test_ours_come_back_bit_for_bit(sizes: Any, options: Any, tmp_path: Path):
    expected = make_run(tmp_path / "run", sizes, **options)
    done = to_hugging_face(tmp_path / "run", tmp_path / "theirs", max_shard_bytes=4_000)
    assert done.num_files > 3
    from_hugging_face(tmp_path / "theirs", tmp_path / "ours")
    if "layers_after" in options:
        after = expected["head"].pop("layers")
        expected["stages"] = jax.tree.map(
            lambda *parts: np.concatenate(parts), expected["stages"], after
        )
    assert_same(leaves(tmp_path / "ours" / "weights", 0), by_path(expected))
    with open_checkpoints(
        tmp_path / "ours" / "weights", max_to_keep=None, asynchronous=False
    ) as checkpoints:
        assert read_metadata(checkpoints, 0)["model"] == dataclasses.asdict(sizes)


def test_a_folder_of_several_files_holds_what_one_file_does(tmp_path: Path):
    make_run(tmp_path / "run", DEEPSEEK)
    to_hugging_face(tmp_path / "run", tmp_path / "one")
    to_hugging_face(tmp_path / "run", tmp_path / "many", max_shard_bytes=6_000)
    expected, found = load_file(tmp_path / "one" / "model.safetensors"), {}
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    for name in files:
        of_file = load_file(tmp_path / "many" / name)
        assert sum(x.nbytes for x in of_file.values()) <= 6_000
        assert all(index["weight_map"][tensor] == name for tensor in of_file)
        found |= of_file
    assert_same(found, expected)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in expected.values())
    layers = [int(name.split(".")[2]) for name in index["weight_map"] if ".layers." in name]
    assert layers == sorted(layers)


def test_the_checkpoint_that_is_asked_for_is_taken_or_the_newest(tmp_path: Path):
    old = make_run(tmp_path / "run", LLAMA, step=3)
    new = make_run(tmp_path / "run", LLAMA, step=12)
    for step, expected in ((3, old), (None, new)):
        folder = tmp_path / f"theirs {step}"
        to_hugging_face(tmp_path / "run", folder, step=step)
        found = load_file(folder / "model.safetensors")["model.norm.weight"]
        np.testing.assert_array_equal(found, expected["head"]["norm"])
    with pytest.raises(ValueError, match=r"does not have step 5\. It has: 3, 12\."):
        to_hugging_face(tmp_path / "run", tmp_path / "more", step=5)


def test_another_dtype_is_made_only_if_it_is_asked_for(tmp_path: Path):
    weights = make_run(tmp_path / "run", LLAMA)
    to_hugging_face(tmp_path / "run", tmp_path / "theirs", dtype="bfloat16")
    found = load_file(tmp_path / "theirs" / "model.safetensors")["model.norm.weight"]
    np.testing.assert_array_equal(found, weights["head"]["norm"].astype(jnp.bfloat16))
    assert (
        json.loads((tmp_path / "theirs" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    )
    assert from_hugging_face(tmp_path / "theirs", tmp_path / "a").dtype == "bfloat16"
    assert (
        from_hugging_face(tmp_path / "theirs", tmp_path / "b", dtype="float32").dtype == "float32"
    )
    assert {x.dtype for x in leaves(tmp_path / "b" / "weights", 0).values()} == {np.dtype("f4")}


def test_a_published_size_gets_its_name(tmp_path: Path):
    sizes = models.LlamaConfig(**models.PRESETS["llama-tiny"])
    make_run(tmp_path / "run", sizes)
    to_hugging_face(tmp_path / "run", tmp_path / "theirs")
    from_hugging_face(tmp_path / "theirs", tmp_path / "ours")
    config = load_config([tmp_path / "ours" / "config.yml"], presets=models.PRESETS)
    assert config == Config(model_name="llama-tiny")


def test_memory_holds_the_model_once_on_the_way_in_and_one_leaf_on_the_way_out(tmp_path: Path):
    sizes = dataclasses.replace(
        LLAMA, base_num_decoder_layers=8, base_emb_dim=256, base_mlp_dim=512, head_dim=64
    )
    weights = make_run(tmp_path / "run", sizes)
    sizes_of_leaves = [leaf.nbytes for leaf in jax.tree.leaves(weights)]
    total, largest = sum(sizes_of_leaves), max(sizes_of_leaves)
    del weights

    def peak(convert, *folders: Path) -> int:
        tracemalloc.start()
        convert(*folders)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    few = 2_000_000  # of Python's objects
    assert peak(to_hugging_face, tmp_path / "run", tmp_path / "theirs") < 2 * largest + few
    assert peak(from_hugging_face, tmp_path / "theirs", tmp_path / "ours") < total + few
    assert total > 1.5 * (2 * largest + few)
