"""ZeRO-1 and explicit axes: the losses of the plain run, the memory and collectives of auto."""

import io
from typing import Any

import jax
import numpy as np
import pytest

from jaxpipe import xla
from jaxpipe.models import PRESETS
from jaxpipe.train import compile_train_step, load_config, set_up, train

TINY = (
    "base_emb_dim=16",
    "base_num_decoder_layers=4",
    "base_mlp_dim=32",
    "dtype=float32",
    "max_target_length=16",
    "per_device_batch_size=1",
    "num_pipeline_microbatches=2",
)
RANKS = ("ici_pipeline_parallelism=2", "ici_data_parallelism=2", "ici_fsdp_parallelism=2")
PER_REPEAT = (*RANKS, "pipeline_fsdp_ag_per_repeat=true")
ZERO = "shard_optimizer_over_data=true"
EXPLICIT = "shard_mode=explicit"


def losses(folder, *settings: str) -> list[float]:
    run = (f"output_dir={folder}", "enable_tensorboard=false", "enable_checkpointing=false")
    config = load_config((), (*TINY, *run, "steps=3", *settings), presets=PRESETS)
    return [metrics["loss"] for metrics in train(config, stream=io.StringIO())]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    settings = "pipeline_engine=none", "num_pipeline_microbatches=1"
    return losses(tmp_path_factory.mktemp("plain"), *settings)


def compiled(*settings: str) -> Any:
    config = load_config((), (*TINY, *PER_REPEAT, *settings), presets=PRESETS)
    return compile_train_step(set_up(config, jax.devices()).step)


@pytest.fixture(scope="module")
def auto():
    return compiled(ZERO)


def test_explicit_axes_and_zero_1_have_the_losses_of_the_plain_run(tmp_path, plain):
    got = losses(tmp_path, *PER_REPEAT, ZERO, EXPLICIT)
    np.testing.assert_allclose(got, plain, rtol=1e-5)


@pytest.mark.parametrize("keys", [PER_REPEAT, (*RANKS, ZERO, EXPLICIT)], ids=["repeat", "tick"])
def test_sums_in_bfloat16_have_losses_that_are_near_the_plain_run(tmp_path, plain, keys):
    got = losses(tmp_path, *keys, "reduce_dtype=bfloat16")
    np.testing.assert_allclose(got[0], plain[0], rtol=1e-5)  # nothing was updated yet
    np.testing.assert_allclose(got, plain, rtol=1e-3)
    assert abs(got[-1] / plain[-1] - 1) > 1e-6


def test_explicit_axes_communicate_what_automatic_ones_do_and_need_no_more_memory(auto):
    explicit = compiled(ZERO, EXPLICIT)
    sizes = [xla.totals(xla.audit(step.as_text() or "")) for step in (auto, explicit)]
    moved = [{kind: total.result_bytes for kind, total in of.items()} for of in sizes]
    assert moved[0] == moved[1]
    peaks = [xla.memory(step, "cpu").peak_bytes for step in (auto, explicit)]
    assert peaks[1] <= 1.01 * peaks[0]


def test_zero_1_halves_adams_moments_where_weights_are_split_over_fsdp(auto):
    plain = xla.memory(compiled(), "cpu").argument_bytes
    # Weights and two moments of almost all bytes; over data 2 the moments shrink to a half.
    assert xla.memory(auto, "cpu").argument_bytes < 0.7 * plain


def test_explicit_axes_without_a_pipeline_are_refused():
    with pytest.raises(
        ValueError, match=r"`pipeline_engine` is 'none' and `shard_mode` is 'explici"
    ):
        load_config((), ("pipeline_engine=none", EXPLICIT), presets=PRESETS)
