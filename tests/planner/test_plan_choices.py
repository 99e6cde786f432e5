"""What a planner chooses between, which of several nearly equal plans it takes, and why."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import jaxpipe as jp
from jaxpipe.cli import main
from jaxpipe.planner import parse_devices, simplest_first
from jaxpipe.planner._candidates import layout_groups
from jaxpipe.planner._search import Candidates, expected_memory
from jaxpipe.planner.time import rough_seconds

KEPT: dict[str, Any] = {
    "model_name": "llama2-7b",
    "remat_policy": "minimal_with_context",
    "ici_tensor_parallelism": 1,
}
"""Keys that leave few layouts to compare."""


def test_of_nearly_equal_plans_the_simplest_is_first_and_the_answer_says_so():
    plans = jp.plan(KEPT, "v5p-8", 48, 2048)
    plain = next(plan for plan in plans.plans if not plan.candidate.engine.pipelines)
    piped = next(plan for plan in plans.plans if plan.candidate.engine.pipelines)
    for faster, first_pipelines in ((0.03, False), (0.06, True)):
        seconds = plain.time.seconds / (1 + faster)
        piped = replace(piped, time=replace(piped.time, seconds=seconds))
        ordered = simplest_first([piped, plain], 5)
        assert ordered[0].candidate.engine.pipelines == first_pipelines
        answer = replace(plans, best_plans=replace(plans.best_plans, plans=ordered))
        assert ("faster, and 1 is simpler" in repr(answer)) != first_pipelines


def test_keys_of_a_plan_give_it_back():
    """What a plan's settings leave out is what a plan may not choose otherwise, but for options."""
    for plan in jp.plan(KEPT, "v5p-8", 48, 2048, num_plans=8).plans:
        options = {
            "pipeline_vocab_parallel": plan.candidate.options.vocab_parallel,
            "shard_optimizer_over_data": plan.candidate.options.zero1,
        }
        again = jp.plan(plan.settings | options, "v5p-8", 48, 2048, num_plans=1).best
        assert again.candidate == plan.candidate and again.time == plan.time


def test_a_schedule_is_planned_by_every_engine_that_runs_it():
    plans = jp.plan(KEPT, "v5p-8", 48, 2048, schedule="zbv", num_plans=8).plans
    assert {plan.settings["pipeline_engine"] for plan in plans} == {"scheduled", "mpmd"}
    assert {plan.settings["pipeline_schedule"] for plan in plans} == {"zbv"}
    # One of them is refused for a key that the other reads.
    plans = jp.plan(KEPT, "v5p-8", 48, 2048, schedule="zbv", pipeline_fsdp_ag_once=True).plans
    assert {plan.settings["pipeline_engine"] for plan in plans} == {"scheduled"}


def test_faster_layouts_that_are_refused_are_shown():
    """4,096 channels do not divide over 18 devices, so `fsdp` is smaller than it could be."""
    plans = jp.plan("llama3-8b", "gb200:1x18", 36, 4096, ici_tensor_parallelism=1)
    assert plans.best.settings["ici_fsdp_parallelism"] in (1, 2)
    refused = "in dim 1 of (128256, 4096), which does not divide over fsdp 18"
    assert "layouts that might be faster, by the trainer, such as\n    fsdp 18, no" in repr(plans)
    assert refused in repr(plans) and refused in plans.record()["refused"][0]["error"]


def test_a_plan_says_how_far_published_steps_were_from_predictions():
    """The range is that of docs/predictions.md, which a test compares with published rows."""
    plans = jp.plan(KEPT | {"ici_pipeline_parallelism": 2}, "h100:8", 64, 4096)
    seconds = plans.best.time.seconds
    record = plans.record()
    assert f"so {0.93 * seconds:.3g} to {1.17 * seconds:.3g} s" in record["rests_on"]
    assert record["plain"]  # a pipeline is given, so that data parallelism alone is not there
    explicit = jp.plan(KEPT | {"shard_mode": "explicit"}, "h100:8", 64, 4096).record()
    unread = "ruled out by `shard_mode`, which a step without a pipeline does not read."
    assert explicit["plain"] == unread


def test_stages_of_several_on_a_rank_may_have_fewer_layers_at_the_ends():
    """Llama 3.1's 126 layers leave one out at each end of 128 stages; 30 of 32 here."""
    keys: dict[str, Any] = {
        "model_name": "llama-tiny",
        "base_num_decoder_layers": 30,
        "num_pipeline_repeats": 8,
    }
    keys |= {"ici_pipeline_parallelism": 4, "num_pipeline_microbatches": 8, "remat_policy": "full"}
    plan = jp.plan(keys, "v5p-8", 32, 64, schedule="interleaved_1f1b").best
    assert plan.candidate.counts == (0, *(1,) * 30, 0)


def test_programs_of_ranks_are_planned_where_a_rank_is_on_one_host():
    keys = KEPT | {"pipeline_engine": "mpmd", "pipeline_schedule": "1f1b"}
    keys |= {"num_pipeline_microbatches": 16, "ici_data_parallelism": 1}
    assert jp.plan(keys | {"ici_pipeline_parallelism": 8}, "v5p-64", 256, 2048).best
    with pytest.raises(ValueError, match="No layout"):
        jp.plan(keys | {"ici_pipeline_parallelism": 4}, "v5p-64", 256, 2048)
    with pytest.raises(
        ValueError, match="No layout"
    ):  # six devices for each rank, on hosts of eight
        jp.plan(keys | {"ici_pipeline_parallelism": 4}, "h100:3x8", 192, 2048)


def test_parts_of_the_vocabulary_that_are_given_are_kept_by_all_plans():
    keys = KEPT | {"num_vocab_tiling": 4, "ici_pipeline_parallelism": 2, "ici_data_parallelism": 1}
    plans = jp.plan(keys, "v5p-8", 48, 2048, schedule="1f1b").plans
    assert {plan.settings["num_vocab_tiling"] for plan in plans} == {4}


def test_replicas_divide_the_state_of_the_optimizer_unless_told_otherwise():
    given = KEPT | {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2}
    chosen, told = (
        jp.plan(given | more, "v5p-8", 48, 2048, memory_gb=102).best
        for more in ({}, {"shard_optimizer_over_data": False})
    )
    assert chosen.settings["shard_optimizer_over_data"] is True
    assert not told.settings["shard_optimizer_over_data"]
    assert chosen.memory.optimizer == pytest.approx(told.memory.optimizer / 2)


def test_sums_over_slices_take_the_network_of_the_data_centre():
    """Two slices of 4 v5p: a device sends half of its float32 or 16-bit sums, twice, at 5e9 a s."""
    given: dict[str, Any] = {
        "model_name": "llama2-7b",
        "pipeline_engine": "none",
        "ici_fsdp_parallelism": 4,
        "dcn_data_parallelism": 2,
    }
    given |= {"num_pipeline_microbatches": 1, "ici_data_parallelism": 1}
    plan = jp.plan(given, "v5p-8", 96, 2048, num_slices=2).best
    parameters = 32 * (4 * 4096**2 + 3 * 4096 * 11008) / 4
    seconds = 2 * 0.5 * 2 * parameters / (0.8 * 6.25e9)
    assert plan.time.parts["gradient_reduction"] == pytest.approx(seconds, rel=0.01)


def test_racks_and_parts_of_racks_are_domains_of_links():
    parts, whole = parse_devices("gb200:4x18"), parse_devices("gb200:288")
    assert (parts.num_devices, parts.devices_per_domain, parts.devices_per_host) == (72, 18, 4)
    assert (whole.num_devices, whole.devices_per_domain, whole.devices_per_host) == (288, 72, 4)


@pytest.mark.parametrize(
    ("name", "chips"),
    [
        ("v6e-1", "1x1"),
        ("v5p-8", "2x2x1"),
        ("v5p-48", "2x4x3"),
        ("v5p-64", "2x4x4"),
        ("v5p-640", "4x4x20"),
        ("v6e-12", "2x6"),
    ],
)
def test_slices_are_made_of_hosts_and_large_ones_of_cubes(name: str, chips: str):
    assert parse_devices(name).topology.partition(":")[2] == chips


def test_a_model_of_hugging_face_is_planned_by_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    """The sizes are those of Llama 2 7B's published config.json."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
        "rms_norm_eps": 1e-05,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["--devices", "v5p-8", "--batch", "48", "--sequence", "2048", "--json"]
    arguments += ["ici_tensor_parallelism=1", "ici_pipeline_parallelism=1"]
    answers = []
    for model in (["--hf", str(tmp_path)], ["model_name=llama2-7b"]):
        assert main(["plan", *model, *arguments]) == 0
        answers.append(json.loads(capsys.readouterr().out)["plans"])
    seconds = [[plan["step_seconds"] for plan in plans] for plans in answers]
    assert seconds[0] == pytest.approx(seconds[1])


def test_inputs_of_layers_are_on_the_host_where_they_do_not_fit():
    """MaxText's recipe for v6e-8: FSDP with offloaded inputs, measured at 3.44 s a step."""
    given: dict[str, Any] = {"num_pipeline_microbatches": 1, "pipeline_engine": "none"}
    plans = jp.plan("llama3-8b", "v6e:2x4", 24, 8192, memory_gb=26, **given)
    settings = plans.best.settings
    assert settings["ici_fsdp_parallelism"] == 8
    assert (settings["remat_policy"], settings["decoder_layer_input"]) == ("custom", "offload")
    input_of_layer = 2 * 3 * 8192 * 4096  # bfloat16, three rows of a device
    assert plans.best.memory.activations == 2 * input_of_layer
    # 32 layers there and back, at 32 GB/s, beside the products of the step.
    assert 2 * 32 * input_of_layer / 32e9 < plans.best.time.parts["products"]
    assert plans.best.time.parts["host"] == 0
    assert 3.44 < plans.best.time.seconds < 1.2 * 3.44
    # With more memory they stay: that is simpler, and as fast.
    assert jp.plan("llama3-8b", "v6e:2x4", 24, 8192, **given).best.candidate.policy == "full"


def test_what_nothing_fits_says_which_state_in_16_bits_would():
    with pytest.raises(ValueError, match=r"would fit with `weight_dtype=bfloat16`, .* no plan"):
        jp.plan("llama3.1-70b", "v6e:4x8", 64, 8192)
    assert jp.plan("llama3.1-70b", "v6e:4x8", 64, 8192, weight_dtype="bfloat16").plans


def test_gpus_hide_no_transfer_to_the_host():
    """An H200 hid none: 12.3 GB out and back took 0.38 s (docs/benchmarks.md, One GPU)."""
    given: dict[str, Any] = {"num_pipeline_microbatches": 1, "pipeline_engine": "none"}
    plan = jp.plan("llama3-8b", "h100:8", 24, 8192, memory_gb=25, **given).best
    input_of_layer = 2 * 3 * 8192 * 4096
    assert plan.time.parts["host"] == pytest.approx(2 * 32 * input_of_layer / 64e9)


def test_candidates_come_by_their_seconds_though_few_are_computed():
    request = jp.plan("llama2-7b", "v5p-8", 48, 2048, ici_fsdp_parallelism=2).request
    groups = tuple(layout_groups(request.space))
    layouts = (layout for group in groups for layout in group.layouts())
    every = sorted(layouts, key=lambda layout: rough_seconds(layout, request))
    fits = [expected_memory(layout, request).total <= request.limit for layout in every]
    found = Candidates(groups, request)
    for fit in (True, False):
        wanted = [layout for layout, is_right in zip(every, fits, strict=True) if is_right == fit]
        assert wanted and list(found.by_seconds(fit=fit)) == wanted
