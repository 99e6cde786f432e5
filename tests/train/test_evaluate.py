"""Evaluation through every engine equals the plain one; the best checkpoints stay."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpipe.data.batches import Batch, FiniteBatches
from jaxpipe.train import Config, read_metrics, set_up, train
from jaxpipe.train.checkpoint import best_step, open_checkpoints
from jaxpipe.train.loop import _loop
from jaxpipe.train.step import (
    init_state,
    make_eval_step,
    make_evaluate,
    make_train_step,
    mesh_context,
    shard_batch,
)

from .runs import DEEPSEEK, NONE, ROWS, TINY, Settings, data_of, setup_of

pytestmark = pytest.mark.ci

LENGTH, VOCAB = 16, 64


def batches() -> list[Batch]:
    """Three, with masks that differ in weight; of the last one most rows are padding."""
    rng = np.random.default_rng(3)
    made = []
    for share in (1.0, 0.4, 0.1):
        tokens = rng.integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
        mask = (rng.random((ROWS, LENGTH)) < share).astype(np.float32)
        mask[3:] *= share > 0.1
        made.append(
            {
                "tokens": tokens[:, :-1],
                "targets": tokens[:, 1:],
                "target_weights": mask,
                "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH)),
                "segment_ids": np.ones((ROWS, LENGTH), np.int32),
            }
        )
    return made


class Given(FiniteBatches):
    """Batches that are there."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches, self.batch_size = batches, len(batches[0]["tokens"])

    def __len__(self) -> int:
        return len(self.batches)

    def rows(self, index: int, numbers: Sequence[int]) -> Batch:
        return {name: rows[list(numbers)] for name, rows in self.batches[index].items()}

    def num_targets(self, index: int) -> int:
        return int(self.batches[index]["target_weights"].sum())


def evaluated(devices: int, *settings: Settings, given: Sequence[Batch] = ()) -> Any:
    """Metrics of the first weights."""
    found = Given(given or batches())
    setup = setup_of(devices, *settings, {"eval_interval": 1, "eval_steps": len(found)})
    with mesh_context(setup.step):
        evaluate = make_evaluate(setup.step, setup.config, found)
        assert evaluate is not None
        return evaluate(init_state(setup.step))


RANKS: Settings = {"ici_pipeline_parallelism": 2}
ENGINES: dict[str, tuple[int, Settings]] = {
    "circular": (4, {"ici_fsdp_parallelism": 2, "pipeline_fsdp_ag_per_repeat": True}),
    "context": (4, {"ici_context_parallelism": 2}),
    "vocabulary": (2, {"pipeline_vocab_parallel": True}),
    "scheduled": (2, {"pipeline_engine": "scheduled", "pipeline_schedule": "zbv"}),
    "uneven": (
        2,
        {
            "pipeline_engine": "scheduled",
            "pipeline_layout": "Et|t*3L",
            "pipeline_vocab_parallel": True,
        },
    ),
    "slices": (
        2,
        {
            "pipeline_engine": "scheduled",
            "pipeline_schedule": "seq1f1b",
            "num_pipeline_slices": 4,
        },
    ),
    "mpmd": (2, {"pipeline_engine": "mpmd", "pipeline_schedule": "zero_bubble_h1"}),
    "linen": (2, {"enable_nnx": False}),
    "nnx": (2, {"enable_nnx": True, "pure_nnx_decoder": True}),
}


@pytest.fixture(scope="module")
def plain() -> dict[str, float]:
    return evaluated(1, NONE)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("scheduled", "slices", "linen")))
        for name in ENGINES
    ],
)
def test_every_engine_evaluates_to_the_plain_loss(plain, name: str):
    devices, settings = ENGINES[name]
    # Dropout is for training alone.
    dropout = {} if name in ("linen", "nnx", "slices") else {"dropout_rate": 0.5}
    found = evaluated(devices, RANKS, settings, dropout)
    assert found.keys() == plain.keys()
    for key in ("eval_loss", "eval_perplexity", "eval_accuracy"):
        np.testing.assert_allclose(found[key], plain[key], rtol=1e-5)


def test_the_loss_is_that_of_all_tokens_however_they_lie_in_batches(plain):
    several = batches()
    whole = {name: np.concatenate([batch[name] for batch in several]) for name in several[0]}
    settings = {"per_device_batch_size": 24.0}
    found = evaluated(1, NONE, settings, given=[whole])
    np.testing.assert_allclose(found["eval_loss"], plain["eval_loss"], rtol=1e-5)


@pytest.mark.slow
def test_losses_beside_the_cross_entropy_are_apart():
    with_balance = evaluated(1, NONE, DEEPSEEK, {"z_loss_multiplier": 0.01})
    without = evaluated(1, NONE, DEEPSEEK, {"load_balance_loss_weight": 0.0})
    assert with_balance["eval_load_balance_loss"] > 0.01
    assert with_balance["eval_z_loss"] > 0.01
    np.testing.assert_allclose(with_balance["eval_loss"], without["eval_loss"], rtol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pipeline_vocab_parallel": True},
        pytest.param(
            {"pipeline_engine": "scheduled", "pipeline_vocab_parallel": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["circular", "circular, vocabulary", "scheduled"],
)
def test_no_gradient_is_computed(settings: Settings):
    """A step has 3 matrix products for each one of the evaluation, or 4 with the forward again."""
    setup = setup_of(2, RANKS, {"remat_policy": "none"}, settings)
    with jax.set_mesh(setup.mesh):
        state, batch = init_state(setup.step), shard_batch(setup.batch, batches()[0])
        forward: Any = make_eval_step(setup.step)
        both: Any = make_train_step(setup.step)
        forward = forward.lower(state["weights"], batch).compile().as_text()
        both = both.lower(state, batch).compile().as_text()
    assert forward.count(" dot(") > 5
    assert both.count(" dot(") >= 2.5 * forward.count(" dot(")


SETTINGS = TINY | NONE | {"ici_fsdp_parallelism": 8, "per_device_batch_size": 1.0}
SETTINGS |= {"num_pipeline_microbatches": 1, "eval_steps": 2, "eval_interval": 1}


def run(folder: Path, **settings: Any) -> str:
    shown = io.StringIO()
    train(Config.model_validate(SETTINGS | {"output_dir": str(folder)} | settings), stream=shown)
    return shown.getvalue()


def with_losses(monkeypatch, losses: dict[int, float]) -> None:
    """Evaluations find these, by step."""

    def make(plan, evaluation, batches, on_batch_done):
        return lambda state: {"eval_loss": losses[int(state["step"])]}

    monkeypatch.setattr(_loop, "make_evaluate", make)


def test_a_run_evaluates_every_few_steps_and_at_its_end_and_trains_as_without(tmp_path):
    text = {"dataset_type": "text", "vocab_size": 257, "max_target_length": 32}
    evaluated = {"eval_interval": 2, "eval_files": ("builtin:sonnets",), "sample_prompt": "Thy"}
    said = run(tmp_path / "a", steps=5, log_period=5, sample_max_tokens=8, **text, **evaluated)
    run(tmp_path / "b", steps=5, eval_interval=0, eval_steps=-1, **text)
    lines, plain = (read_metrics(tmp_path / x / "default" / "metrics.jsonl") for x in "ab")
    assert [line["loss"] for line in lines] == [line["loss"] for line in plain]
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4, 5]
    shown = [f"sample after step {step}:\n\n    Thy" in said for step in range(1, 6)]
    assert shown == [False, True, False, True, True]
    assert all(line["eval_seconds"] > 0 for line in lines if "eval_loss" in line)
    assert [f"step {step}/5" in said for step in range(1, 6)] == [False, True, False, True, True]
    # It is the loss of the newest weights on other tokens.
    assert len({line["eval_loss"] for line in lines if "eval_loss" in line}) == 3


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_best_checkpoints_stay_beside_the_newest(tmp_path, monkeypatch, asynchronous):
    # After step 6, which has a checkpoint in any case, the loss is no number.
    losses = {1: 5.0, 2: 3.0, 3: 4.0, 4: math.nan, 5: 3.5, 6: math.nan, 7: 8.0, 8: 2.0}
    settings: dict[str, Any] = {"keep_best": 2, "max_to_keep": 1, "checkpoint_period": 3}
    settings |= {"async_checkpointing": asynchronous, "learning_rate_schedule_steps": 9}
    with_losses(monkeypatch, losses)
    run(tmp_path, steps=7, **settings)
    folder = tmp_path / "default" / "checkpoints"

    def kept() -> list[int]:
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())

    assert kept() == [2, 5, 7]  # the best two, and the newest
    assert all((folder / str(number) / "digests.json").exists() for number in kept())
    with open_checkpoints(folder, max_to_keep=1, asynchronous=False) as checkpoints:
        assert best_step(checkpoints) == 2
    assert "resumed after step 7" in run(tmp_path, steps=8, **settings)
    assert kept() == [2, 8]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eval_steps": 3}, "`eval_steps` is 3 and `eval_interval` is 0"),
        ({"keep_best": 1}, "`keep_best` is 1 and `eval_interval` is 0"),
        (
            {"dataset_type": "text", "eval_files": ("builtin:sonnets",)},
            "`eval_files` is .*sonnets.* and `eval_interval` is 0",
        ),
        ({"eval_interval": 5}, "synthetic data has no end. Give `eval_steps`"),
        (
            {"eval_interval": 5, "eval_steps": 1, "keep_best": 1, "enable_checkpointing": False},
            "`keep_best` is 1 and `enable_checkpointing` is false",
        ),
    ],
)
def test_keys_that_nothing_would_read_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Config(**settings)


def test_held_out_documents_are_evaluated_on(tmp_path):
    settings = {"dataset_type": "text", "eval_split_fraction": 0.1, "vocab_size": 257}
    run(tmp_path, steps=2, eval_interval=1, **settings)
    lines = read_metrics(tmp_path / "default" / "metrics.jsonl")
    assert lines[1]["eval_loss"] < lines[0]["eval_loss"]


def test_synthetic_rows_of_evaluation_are_none_of_training():
    setup = set_up(Config(eval_interval=1, eval_steps=4, per_device_batch_size=1), jax.devices())
    found = data_of(setup).evaluation
    assert found is not None and len(found) == 4
    trained = [data_of(setup).training(step)["tokens"] for step in range(8)]
    rows = {row.tobytes() for batch in trained for row in batch}
    assert not rows & {row.tobytes() for batch in found for row in batch["tokens"]}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "there is nothing to evaluate on"),
        (Given(batches()), "`eval_steps` is 4, and there are 3"),
    ],
)
def test_too_little_to_evaluate_on_is_refused(found, message):
    setup = set_up(Config.model_validate(SETTINGS | {"eval_steps": 4}), jax.devices())
    with pytest.raises(ValueError, match=message):
        make_evaluate(setup.step, setup.config, found)
