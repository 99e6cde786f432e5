"""Samples of runs: of every layout, on several devices, while a run trains, and refusals."""

import dataclasses
import io
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

from jaxpipe import models
from jaxpipe.cli import main
from jaxpipe.train import Config, read_metrics, sample, train
from jaxpipe.train.sampling import (
    SamplingOptions,
    make_sample_state,
    open_run,
    printable,
    sampled_config,
)
from jaxpipe.train.step import init_state, mesh_context
from small_models import small_deepseek, small_llama

from .converted import make_run
from .runs import DEEPSEEK, NONE, Settings, flat, setup_of

LLAMA = small_llama(base_num_decoder_layers=4, vocab_size=264)
EXPERTS = small_deepseek(base_num_decoder_layers=5, vocab_size=264)
PROMPTS = ["From fairest creatures", "Thy", "ü"]


def make_folder(folder: Path, sizes: Any, *, layers_after: int = 0, **keys: Any) -> Path:
    """A run of random weights on text of bytes."""
    is_llama = isinstance(sizes, models.LlamaConfig)
    values = {"model_name": "llama-tiny" if is_llama else "deepseek-tiny"}
    values |= {"decoder_block": "llama" if is_llama else "deepseek", **dataclasses.asdict(sizes)}
    values |= {"dataset_type": "text", "dtype": "float32"} | keys
    make_run(folder, sizes, layers_after=layers_after)
    (folder / "config.yml").write_text(yaml.safe_dump(values))
    return folder


def texts(folder: Path, **settings: Any) -> list[str]:
    return [found.text for found in sample(folder, PROMPTS, max_tokens=12, **settings)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("llama") / "run", LLAMA)


@pytest.mark.parametrize(
    "settings",
    [
        {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
        pytest.param({"ici_fsdp_parallelism": 2}, marks=pytest.mark.slow),
        pytest.param({"ici_fsdp_parallelism": -1}, marks=pytest.mark.slow),
        pytest.param({"ici_tensor_parallelism": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_sample_is_the_same_on_several_devices_which_share_the_weights(llama, settings):
    assert texts(llama, **settings) == texts(llama)
    opened = open_run(llama, sampled_config(llama, settings))
    count = opened.plan.mesh.size
    assert count == {-1: 8}.get(settings.get("ici_fsdp_parallelism", 1), count)
    for leaf in jax.tree.leaves(opened.weights["stages"]):
        if leaf.ndim > 2:  # norms are whole everywhere
            assert leaf.addressable_shards[0].data.size * count == leaf.size


@pytest.mark.slow
@pytest.mark.parametrize("axes", [("tensor",), ("expert", "tensor"), ("fsdp", "expert")], ids=str)
def test_a_sample_of_experts_is_the_same_on_several_devices(tmp_path, axes):
    folder = make_folder(tmp_path / "run", EXPERTS)
    settings = {f"ici_{axis}_parallelism": 2 for axis in axes}
    assert texts(folder, **settings) == texts(folder)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [LLAMA, EXPERTS], ids=["llama", "deepseek"])
def test_layers_that_were_saved_after_the_pipeline_are_the_last_ones(tmp_path, sizes):
    """The same numbers, saved as stages and layers after them, are the same model."""
    whole = make_folder(tmp_path / "whole", sizes)
    divided = make_folder(tmp_path / "divided", sizes, layers_after=2)
    # Random weights of the two differ: those of the one are put into the layout of the other.
    opened, expected = (open_run(f, sampled_config(f, {})) for f in (divided, whole))
    assert jax.tree.map(np.shape, opened.weights) == jax.tree.map(np.shape, expected.weights)
    first, last = (
        jax.tree.map(lambda w, part=part: w[part], expected.weights["stages"])
        for part in (slice(-2), slice(-2, None))
    )
    head = expected.weights["head"] | {"layers": last}
    found = opened.plan.lay_out(expected.weights | {"stages": first, "head": head})
    for a, b in zip(*map(jax.tree.leaves, (found, expected.weights)), strict=True):
        np.testing.assert_array_equal(a, b)


TEXT: Settings = {
    "dataset_type": "text",
    "vocab_size": 264,
    "eval_interval": 1,
    "eval_split_fraction": 0.1,
    "sample_prompt": PROMPTS[0],
    "sample_max_tokens": 12,
    "max_target_length": 36,
}
LAYOUTS: dict[str, tuple[int, Settings]] = {
    "circular": (
        4,
        {
            "ici_pipeline_parallelism": 2,
            "ici_fsdp_parallelism": 2,
            "num_layers_per_pipeline_stage": 1,
        },
    ),
    "layers after": (2, {"ici_pipeline_parallelism": 2, "pipeline_parallel_layers": 2}),
    "tensor": (4, {"ici_pipeline_parallelism": 2, "ici_tensor_parallelism": 2}),
    "explicit": (4, {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2,
                     "shard_mode": "explicit"}),
    "context": (2, NONE | {"ici_context_parallelism": 2}),
    "zbv": (
        2,
        {
            "ici_pipeline_parallelism": 2,
            "pipeline_engine": "scheduled",
            "pipeline_schedule": "zbv",
        },
    ),
    "mpmd": (
        4,
        {
            "ici_pipeline_parallelism": 2,
            "ici_fsdp_parallelism": 2,
            "pipeline_engine": "mpmd",
            "pipeline_schedule": "interleaved_1f1b",
        },
    ),
    "nnx": (2, {"ici_pipeline_parallelism": 2, "enable_nnx": True, "pure_nnx_decoder": True}),
    "fp8": (1, NONE | {"quantization": "fp8"}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_of_every_layout_says_what_one_device_says_and_keeps_its_state(name: str):
    devices, settings = LAYOUTS[name]
    found, expected = (state_sample(*run) for run in ((devices, settings), (1, NONE)))
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["circular", "mpmd", "layers after"])
def test_a_run_with_experts_of_every_layout_says_what_one_device_says(name: str):
    devices, settings = LAYOUTS[name]
    more = {"base_num_decoder_layers": 5, "vocab_size": 264}
    rows = ((devices, settings), (1, NONE))
    found, expected = (state_sample(n, DEEPSEEK | TEXT | more | run) for n, run in rows)
    assert found == expected


def state_sample(devices: int, settings: Settings) -> str:
    """The sample of the first weights, of which no bit may change."""
    setup = setup_of(devices, TEXT, settings)
    sample_state = make_sample_state(setup)
    assert sample_state is not None
    with mesh_context(setup.step):
        state = init_state(setup.step)
        before = flat(setup, state)
        found, state = sample_state(state)
        after = flat(setup, state)
    for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        np.testing.assert_array_equal(a, b)
    return found.text


RUN: Settings = TEXT | NONE | {
    "base_emb_dim": 16,
    "base_num_decoder_layers": 2,
    "base_mlp_dim": 32,
    "per_device_batch_size": 1.0,
    "dtype": "float32",
    "learning_rate": 1e-2,
    "learning_rate_schedule_steps": 4,
    "enable_tensorboard": False,
    "eval_steps": 1,
}  # fmt: skip


def trained(folder: Path, **settings: Any) -> tuple[str, list[float]]:
    """What a run says, and the losses of all its steps."""
    shown = io.StringIO()
    train(Config.model_validate(RUN | {"output_dir": str(folder)} | settings), stream=shown)
    lines = read_metrics(folder / "default" / "metrics.jsonl")
    return shown.getvalue(), [line["loss"] for line in lines]


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one device programs compile faster."""
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)


@pytest.mark.ci
@pytest.mark.parametrize("is_resumed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_command_says_what_a_run_has_shown_and_a_resumed_run_trains_as_without_samples(
    tmp_path, capsys, one_device, is_resumed: bool
):
    # That one which is not resumed trains so is in test_evaluate.py.
    said = trained(tmp_path / "shown", steps=1)[0] if is_resumed else ""
    last, losses = trained(tmp_path / "shown", steps=2)
    said += last
    assert [said.count(f"sample after step {step}:\n\n    From") for step in (1, 2)] == [1, 1]
    folder = tmp_path / "shown" / "default"
    words = ["sample", str(folder), "--max-tokens", "12", "--prompt", PROMPTS[0], "--prompt", "Thy"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{folder} step 2: 0.01M parameters in float32 on 1 cpu device(s)\n")
    text = printed.split("\n\n", 1)[1].split("\n[12 tokens]\n")[0]
    assert f"sample after step 2:\n\n{textwrap.indent(text, ' ' * 4)}\n\n" in said
    if is_resumed:
        keys: Settings = {"sample_prompt": "", "sample_max_tokens": 64}
        assert trained(tmp_path / "plain", steps=2, **keys)[1] == losses
        [first] = sample(folder, PROMPTS[:1], max_tokens=12, step=1)
        text = textwrap.indent(printable(first.text), " " * 4)
        assert f"sample after step 1:\n\n{text}\n\n" in said


@pytest.mark.slow
def test_draws_are_those_of_the_seed_whatever_other_prompts_there_are(llama):
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "max_tokens": 12}
    both = sample(llama, PROMPTS, **options)
    assert both == sample(llama, PROMPTS, **options)
    assert both[:1] == sample(llama, PROMPTS[:1], **options)
    assert both != sample(llama, PROMPTS, seed=1, **options)
    cold = sample(llama, PROMPTS, temperature=1e-40, max_tokens=12)
    assert cold == sample(llama, PROMPTS, max_tokens=12)
    # A token in front is one of the prompt, and no part of the text.
    [begun], [spelled] = (
        sample(llama, [prompt], max_tokens=12, bos=bos)
        for prompt, bos in (("hy", ord("T")), ("Thy", None))
    )
    assert begun.token_ids == spelled.token_ids and "T" + begun.text == spelled.text
    ids = [i for found in sample(llama, PROMPTS, temperature=1e4) for i in found.token_ids]
    assert max(ids) <= 256 and len(ids) > 100  # 257 to 263 only fill the vocabulary


@pytest.fixture
def config(llama: Path) -> Iterator[Any]:
    """Changes keys of the run for one test."""
    file, before = llama / "config.yml", (llama / "config.yml").read_text()
    yield lambda **keys: file.write_text(yaml.safe_dump(yaml.safe_load(before) | keys))
    file.write_text(before)


def refusal(folder: Path, *prompts: str, **options: Any) -> str:
    with pytest.raises(ValueError) as error:
        sample(folder, prompts, **options)
    return str(error.value)


def test_what_cannot_be_sampled_is_refused_by_name(llama, tmp_path, config, capsys):
    assert "config.yml is missing. Give the folder of a run" in refusal(tmp_path, "a")
    assert "The prompt '' has no token" in refusal(llama, "")
    assert "`prompts` is empty" in refusal(llama)
    assert "`bos` is 264 and `vocab_size` 264" in refusal(llama, "a", bos=264)
    assert "`steps` is no key that a sample reads" in refusal(llama, "a", steps=3)
    assert "does not have step 3. It has: 7" in refusal(llama, "a", step=3)
    assert "needs 16 devices" in refusal(llama, "a", ici_fsdp_parallelism=16)
    config(dataset_type="synthetic")
    assert "nothing says which tokenizer its tokens are of" in refusal(llama, "a")
    assert sample(llama, ["a"], tokenizer="bytes", max_tokens=1)[0].prompt == "a"
    config(base_mlp_dim=48)
    assert "of another model" in refusal(llama, "a")
    config(rope_max_timescale=5.0)
    assert "rope_max_timescale is 10000.0 in the checkpoint, 5.0" in refusal(llama, "a")
    averaged = make_folder(tmp_path / "averaged", LLAMA)
    make_run(averaged, LLAMA, step=8, optimizer={"name": "schedule_free_adamw"})
    assert "the model is an average of them" in refusal(averaged, "a")
    assert main(["sample", str(llama), "--prompt", "a", "mine.yml"]) == 2
    assert "'mine.yml' is not `key=value`" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["sample", str(llama), "--prompt", "\ud800"])
    assert "is not UTF-8." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "`max_tokens` is 0. Give at least 1"),
        ({"temperature": -1.0}, "`temperature` is -1. Give 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "`top_p` is 0. Give a share above 0"),
        ({"top_p": 0.5}, "`top_p` is 0.5 and `temperature` 0, which takes the likeliest"),
    ],
)
def test_options_out_of_their_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingOptions(**options)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sample_prompt": "a"}, "`sample_prompt` is 'a' and `eval_interval` is 0"),
        (
            {"sample_prompt": "a", "eval_interval": 1, "eval_steps": 1},
            "`sample_prompt` is 'a' and `dataset_type` 'synthetic', so nothing says which",
        ),
        ({"sample_max_tokens": 3}, "`sample_max_tokens` is 3 and there is no `sample_prompt`"),
        ({"sample_temperature": 1.0}, "`sample_temperature` is 1.0 and there is no"),
    ],
)
def test_keys_of_samples_that_nothing_would_read_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        Config(**keys)


def test_a_sample_of_a_run_that_is_longer_than_its_rows_is_refused():
    setup = setup_of(1, TEXT, NONE, {"sample_max_tokens": 15})
    with pytest.raises(ValueError, match=r"`sample_max_tokens` is 15, .* has room for 14. Give"):
        make_sample_state(setup)


def test_a_terminal_is_given_no_commands():
    assert printable("a\x1b[2J\tb\n\x07c") == "a\ufffd[2J\tb\n\ufffdc"
