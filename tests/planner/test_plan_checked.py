"""Answers of the planner beside arithmetic and the trainer's own state, and what it refuses."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxpipe as jp
from jaxpipe.planner import absent_devices
from jaxpipe.train.planning._source import _set_up
from jaxpipe.train.step import state_shapes

MU: dict[str, Any] = {"optimizer_arguments": {"mu_dtype": "bfloat16"}}
IN_16_BITS: dict[str, Any] = {"weight_dtype": "bfloat16"}


@pytest.mark.parametrize("keys", [{}, IN_16_BITS, MU, IN_16_BITS | MU], ids=str)
def test_the_state_is_as_large_as_the_trainer_makes_it(keys: dict[str, Any]):
    given = {"ici_fsdp_parallelism": 8, "pipeline_engine": "none", "num_pipeline_microbatches": 4}
    plans = jp.plan("llama3-8b", "h200:8", 32, 4096, num_plans=1, **given, **keys)
    step = _set_up(plans.best.settings, absent_devices(plans.request.devices))
    state = state_shapes(step.state)
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)]
    memory = plans.best.memory
    assert 8 * (memory.weights + memory.optimizer) == pytest.approx(sum(sizes), rel=1e-3)


def test_float32_on_gpus_takes_no_less_than_its_products_do():
    """An A100 computes 156 TFLOP/s of float32, in TF32, by NVIDIA's data sheet."""
    given: dict[str, Any] = {"dtype": "float32", "remat_policy": "full", "pipeline_engine": "none"}
    plans = jp.plan("llama3-8b", "a100:1x8", 256, 512, **given)
    matrices = 8.03e9 - 128_256 * 4096  # the embedding is looked up
    of_layers = matrices - 128_256 * 4096
    flops = (6 * matrices + 2 * of_layers) * 256 * 512
    assert plans.best.time.seconds > flops / (8 * 156e12)


def test_long_sequences_are_divided_where_that_fits_or_is_faster():
    fits = jp.plan("llama3.1-70b", "v6e:8x8", 64, 65_536)
    assert fits.best.candidate.sizes["context"] > 1
    free = jp.plan("llama3-8b", "v5p-128", 128, 32_768).best
    whole = jp.plan("llama3-8b", "v5p-128", 128, 32_768, ici_context_parallelism=1).best
    assert free.time.seconds < 0.95 * whole.time.seconds


def test_wide_heads_are_planned_as_hopper_runs_them():
    """Scores of 32,768 tokens would not be stored: a layout was refused for lack of a kernel."""
    hopper = jp.plan("gemma3-4b", "h200:8x8", 128, 32_768)
    assert hopper.best.memory.total < hopper.request.limit
    with pytest.raises(ValueError, match="more than 4 GiB of scores"):
        jp.plan("gemma3-4b", "a100:8x8", 128, 32_768, ici_context_parallelism=1)


def test_scores_that_no_kernel_computes_make_smaller_microbatches_and_no_refusal():
    plans = jp.plan("gpt-oss-20b", "h200:8", 64, 8192)
    rows = plans.best.candidate
    stored = 64 // rows.num_shards // rows.microbatches * 64 * 8192**2 * 4 / rows.sizes["tensor"]
    assert stored <= 2**32 and not plans.best_plans.refused
    parts = plans.best.time.parts
    assert parts["attention_scores"] > parts["products"] + parts["other_compute"]
    assert "Attention: no kernel computes it" in repr(plans)
    assert "data parallelism alone fits, but attention" in repr(plans)
    assert "no kernel" not in repr(jp.plan("qwen3-30b-a3b", "h200:8", 64, 8192))


def test_the_keys_of_a_plan_are_taken_by_the_planner():
    first = jp.plan("llama3.1-70b", "v6e:8x8", 2048, 2048).best
    assert first.settings["decoder_layer_input"] == "offload"
    again = jp.plan(dict(first.settings), "v6e:8x8", 2048, 2048).best
    assert again.time.seconds == first.time.seconds and again.memory == first.memory


def test_gradients_of_accumulated_calls_are_added_up_as_those_of_microbatches():
    def sums(**keys: int) -> float:
        given: dict[str, Any] = {"pipeline_engine": "none", "remat_policy": "full"} | keys
        parts = jp.plan("llama3-8b", "h200:8", 64, 2048, **given).best.time.parts
        return parts["other_compute"]

    calls = sums(gradient_accumulation_steps=8, num_pipeline_microbatches=1)
    assert calls == pytest.approx(sums(num_pipeline_microbatches=8), rel=1e-6)


def test_contradictions_and_counts_are_refused_by_name():
    with pytest.raises(ValueError, match="`schedule` is '1f1b', and `pipeline_engine`"):
        jp.plan("llama3-8b", "h100:8", 32, 2048, schedule="1f1b", pipeline_engine="circular")
    with pytest.raises(ValueError, match="`num_pipeline_microbatches` is 0"):
        jp.plan("llama3-8b", "h100:8", 32, 2048, num_pipeline_microbatches=0)
    with pytest.raises(ValueError, match="multiply to 16, and there are 8 devices"):
        jp.plan("llama3-8b", "h100:8", 32, 2048, ici_fsdp_parallelism=4, ici_data_parallelism=4)


MODEL = jp.Model(
    embed=lambda weights, batch: batch["x"] @ weights,
    layer=lambda weights, x, batch: jnp.tanh(x @ weights),
    loss=lambda weights, x, batch: jnp.mean((x @ weights) ** 2),
)
PARAMS = {"embed": jnp.ones((4, 8)), "layers": jnp.ones((4, 8, 8)), "head": jnp.ones((8, 2))}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"params": {"embed": PARAMS["embed"], "layers": PARAMS["layers"]}}, "a dict with 'embed'"),
        ({"microbatches": 0}, "`microbatches` is 0"),
        ({"chunks": 99}, "given: chunks 99"),
        ({"zero1": "x"}, "`zero1` is 'x'"),
        ({"reduce_dtype": "int8"}, "`reduce_dtype` is int8"),
        (
            {"max_stages": 1, "scan_ticks": False},
            "`scan_ticks` is not read by 'unpipelined', 'scheduled', 'mpmd'.",
        ),
    ],
    ids=["no head", "no microbatches", "too many chunks", "no bool", "integers", "unread"],
)
def test_wrong_arguments_of_own_models_are_named(keys: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        given: dict[str, Any] = {"params": PARAMS, "example": {"x": jnp.ones((8, 4))}} | keys
        jp.plan(MODEL, "v5p-8", **given)


def test_a_model_as_small_as_an_example_has_a_plan():
    plans = jp.plan(MODEL, "v5p-8", params=PARAMS, example={"x": jnp.ones((8, 4))})
    assert math.isfinite(plans.best.time.seconds)
