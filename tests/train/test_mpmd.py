"""The trainer's engine `mpmd`: the others' losses, states that go anywhere, devices of its own."""

import functools
import io
import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxpipe.cli import main
from jaxpipe.train import Config, compile_train_step, train
from jaxpipe.train.logs import describe
from jaxpipe.train.plan import select_schedule
from jaxpipe.train.step import init_state, stored_shardings

from .runs import (
    DEEPSEEK,
    DROPOUT,
    GEMMA,
    GPT_OSS,
    LLAMA4,
    MIXTURE,
    NONE,
    TINY,
    Run,
    Settings,
    setup_of,
    three_steps,
)

MPMD: Settings = {"pipeline_engine": "mpmd", "ici_pipeline_parallelism": 2}
ZBV: Settings = MPMD | {"pipeline_schedule": "zbv"}
DUALPIPE: Settings = MPMD | {"pipeline_schedule": "dualpipe"}
UNEVEN: Settings = MPMD | {"pipeline_schedule": "1f1b", "pipeline_layout": "Et|t*3L"}
FP8: Settings = {"quantization": "fp8"}

# Rank 0 has two of three stages, which no other engine runs.
UNEQUAL = """0F0,0F1,2F0,2B0,2F1,2B1,0B0,0B1
1F0,1F1,1B0,1B1
"""

# Devices and settings. Those with a text for a schedule read it from a file.
RUNS: dict[str, tuple[int, Settings]] = {
    "none": (1, NONE),
    "zbv, a V": (2, ZBV),
    "dualpipe": (2, DUALPIPE | {"pipeline_layout": "Et|t*3L"}),
    "uneven stages, fsdp 2, tensor 2": (
        8,
        UNEVEN | {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
    ),
}
SLOW: dict[str, tuple[int, Settings]] = {
    "circular": (2, {"ici_pipeline_parallelism": 2}),
    "scheduled": (2, ZBV | {"pipeline_engine": "scheduled"}),
    "auto, which interleaves": (2, MPMD),
    "more stages on one rank than on the other": (
        2,
        MPMD
        | {"pipeline_schedule": UNEQUAL, "num_pipeline_microbatches": 2}
        | {"pipeline_layout": "Et|t|ttL"},
    ),
    "tied dualpipe": (4, DUALPIPE | {"ici_fsdp_parallelism": 2, "logits_via_embedding": True}),
    "tied dualpipe, none": (1, NONE | {"logits_via_embedding": True}),
    "slices": (2, MPMD | {"pipeline_schedule": "seq1f1b", "num_pipeline_slices": 2}),
    "tied slices, none": (1, NONE | {"logits_via_embedding": True}),
    "tied slices, fsdp 2": (
        8,
        MPMD
        | {"pipeline_schedule": "seq1f1b", "num_pipeline_slices": 4}
        | {"ici_pipeline_parallelism": 4, "ici_fsdp_parallelism": 2}
        | {"logits_via_embedding": True},
    ),
    "a V with empty ends": (2, ZBV | {"pipeline_layout": "E|t|ttt|L"}),
    "layers after an uneven pipeline": (
        2,
        MPMD | {"pipeline_parallel_layers": 3, "pipeline_layout": "Ett|tL"},
    ),
    "data 2, context 2, a split backward that keeps all": (
        8,
        MPMD
        | {"pipeline_schedule": "zero_bubble_h1", "remat_policy": "none"}
        | {"ici_data_parallelism": 2, "ici_context_parallelism": 2},
    ),
    "a policy on ticks and layers, tiles of the vocabulary": (
        2,
        MPMD
        | {"pipeline_schedule": "gpipe", "remat_policy": "minimal", "num_vocab_tiling": 2}
        | {"set_remat_policy_on_layers_per_stage": True},
    ),
    "dropout, none": (1, DROPOUT | NONE),
    "dropout, uneven": (2, DROPOUT | ZBV | {"pipeline_layout": "Et|t|tt|L"}),
    "deepseek, none": (1, DEEPSEEK | NONE),
    "deepseek, uneven": (4, DEEPSEEK | UNEVEN | {"ici_expert_parallelism": 2}),
    "qwen3_moe, none": (1, MIXTURE | NONE),
    "qwen3_moe, uneven": (4, MIXTURE | UNEVEN | {"ici_expert_parallelism": 2}),
    "gemma3, none": (1, GEMMA | NONE | {"pipeline_parallel_layers": -1}),
    "gpt_oss, none": (1, GPT_OSS | NONE),
    "llama4, none": (1, LLAMA4 | NONE),
    "llama4, uneven": (4, LLAMA4 | UNEVEN | {"ici_expert_parallelism": 2}),
    "gpt_oss, uneven": (4, GPT_OSS | UNEVEN | {"ici_expert_parallelism": 2}),
    "gemma3, uneven": (4, GEMMA | UNEVEN | {"ici_fsdp_parallelism": 2}),
    "fp8, none": (1, FP8 | NONE),
    "fp8, zbv": (2, FP8 | ZBV),
    "fp8, fsdp 2": (4, FP8 | MPMD | {"pipeline_schedule": "1f1b", "ici_fsdp_parallelism": 2}),
}


@functools.cache
def run(name: str) -> Run:
    return three_steps(*(RUNS | SLOW)[name])


def losses(name: str) -> list[float]:
    return [metrics["loss"] for metrics in run(name).metrics]


def marked(*names: str) -> Iterator[Any]:
    """One or two runs of a test, which is slow if one of them is."""
    for name in names:
        parts = name.split(" -> ")
        slow = any(part in SLOW for part in parts)
        yield pytest.param(*parts, marks=pytest.mark.slow if slow else (), id=name)


@pytest.mark.parametrize("name", [*marked(*(name for name in RUNS | SLOW if "none" not in name))])
def test_losses_are_those_of_the_run_without_a_pipeline(name):
    family = f"{name.split(',')[0]}, none"
    plain, metrics = run(family if family in SLOW else "none").metrics, run(name).metrics
    assert metrics[0].keys() == plain[0].keys()
    for key, value in plain[0].items():
        np.testing.assert_allclose(metrics[0][key], value, rtol=1e-5, err_msg=key)
    found, expected = ([of_step["loss"] for of_step in of_run] for of_run in (metrics, plain))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        *marked("zbv, a V", "dualpipe", "layers after an uneven pipeline"),
        pytest.param("uneven stages, fsdp 2, tensor 2", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(name):
    assert run(name).go_on(run(name).saved) == losses(name)[2]


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        *marked(
            "none -> uneven stages, fsdp 2, tensor 2",
            "zbv, a V -> none",
            "zbv, a V -> uneven stages, fsdp 2, tensor 2",
            "circular -> a V with empty ends",
            "circular -> dualpipe",
            "dualpipe -> zbv, a V",
            "a V with empty ends -> circular",
            "scheduled -> more stages on one rank than on the other",
            "more stages on one rank than on the other -> scheduled",
            "layers after an uneven pipeline -> zbv, a V",
            "zbv, a V -> layers after an uneven pipeline",
        )
    ],
)
def test_a_run_goes_on_under_another_engine_and_layout(writer, reader):
    np.testing.assert_allclose(run(reader).go_on(run(writer).saved), losses("none")[2], rtol=1e-5)


@pytest.mark.parametrize("name", [*marked("zbv, a V", "uneven stages, fsdp 2, tensor 2")])
def test_every_layout_starts_from_the_same_canonical_state(name):
    jax.tree.map(np.testing.assert_array_equal, run(name).first, run("none").first)


def test_a_rank_holds_its_own_stages_and_the_ends_that_it_reads_and_steps_leave_them_there():
    found = run("zbv, a V")
    where = stored_shardings(found.setup.step)
    adam = next(part for part in where["optimizer"] if hasattr(part, "mu"))
    for tree in (where["weights"], adam.mu, adam.nu):
        # A V: rank 0 has the first and the last stage, so the tied embedding is there alone.
        for stage, rank in enumerate((0, 1, 1, 0)):
            assert {place.mpmd_idxs for place in jax.tree.leaves(tree["stages"][stage])} == {
                (rank,)
            }
        assert {p.mpmd_idxs for n in ("embed", "head") for p in jax.tree.leaves(tree[n])} == {(0,)}
    for state in (init_state(found.setup.step), found.last):
        assert jax.tree.map(lambda leaf: leaf.mpmd_sharding, state) == where
        for leaf in jax.tree.leaves(state):
            for rank in range(2):
                array = leaf.on_rank(rank)
                assert (array is not None) == (rank in leaf.mpmd_idxs)
                assert array is None or array.devices() == {jax.devices()[rank]}


def test_weights_are_split_within_a_rank_and_uneven_stages_have_just_their_layers():
    stages = run("uneven stages, fsdp 2, tensor 2").last["weights"]["stages"]
    ups = [stage["mlp"]["up"] for stage in stages]
    assert [up.shape for up in ups] == [(1, 16, 32), (3, 16, 32)]
    for rank, up in enumerate(ups):
        array = up.on_rank(rank)
        assert {shard.data.shape[1:] for shard in array.addressable_shards} == {(8, 16)}
        assert len(array.devices()) == 4
    assert ups[0].on_rank(0).devices().isdisjoint(ups[1].on_rank(1).devices())


def test_a_tied_embedding_starts_and_stays_equal_on_both_ranks_that_read_it():
    found = run("uneven stages, fsdp 2, tensor 2")
    for state in (init_state(found.setup.step), found.last):
        table = state["weights"]["embed"]["table"]
        assert table.mpmd_idxs == (0, 1)
        np.testing.assert_array_equal(*map(table.on_rank, table.mpmd_idxs))


def test_the_run_tells_its_stages_and_its_schedule():
    plain, uneven = setup_of(1, NONE), setup_of(2, UNEVEN)
    assert uneven.state.weights.num_parameters == plain.state.weights.num_parameters
    first, second, attention, third = describe(uneven, 0).splitlines()
    assert first == describe(plain, 0).splitlines()[0]
    assert "engine mpmd on stage 2: 2 stage(s) on 2 rank(s) x 1 to 3 layer(s), 4 micro" in second
    assert attention == "attention stores its scores (dot_product): cpus have no kernel"
    assert third == "schedule 1f1b: bubble 7.7%, 2 stage inputs held at most"
    assert "x 1 layer(s), 4 micro" in describe(setup_of(2, ZBV), 0)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "layers", "settings", "words"),
    [
        (2, 4, 4, {}, "interleaved_1f1b with 2 stages per rank: bubble 11.1%, "),
        (2, 4, 2, {}, "1f1b: bubble 20.0%, 2 stage inputs held at most"),
        (2, 64, 4, {}, "1f1b: "),
        (4, 4, 16, {}, "interleaved_1f1b with 4 stages per rank: "),
        (4, 4, 16, {"num_pipeline_repeats": 1}, "1f1b: "),
    ],
)
def test_auto_compares_what_schedules_take_where_no_rank_waits_for_a_tick(
    ranks, microbatches, layers, settings, words
):
    config = Config.model_validate(settings | {"pipeline_engine": "mpmd"})
    found = select_schedule(config, ranks, microbatches, layers)
    assert found.reason.startswith(words)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"pipeline_vocab_parallel": True},
            "`pipeline_vocab_parallel` is True, .* `pipeline_engine=circular` or `sched",
        ),
        ({"pipeline_delay_activation_forwarding": True}, "'mpmd' and `pipeline_delay_activation"),
        ({"scan_pipeline_repeats": False}, "'mpmd' and `scan_pipeline_repeats` is False"),
        (
            {"pipeline_fsdp_ag_once": True},
            "`pipeline_fsdp_ag_once` is True, which it does not read. Leave it at False, or choose "
            "`pipeline_engine=circular` or `scheduled`",
        ),
        ({"pipeline_fsdp_ag_per_repeat": True}, "'mpmd' and `pipeline_fsdp_ag_per_repeat` is True"),
        ({"pipeline_fsdp_ag_per_layer": True}, "'mpmd' and `pipeline_fsdp_ag_per_layer` is True"),
        ({"shard_mode": "explicit"}, "'mpmd' and `shard_mode` is 'explicit'"),
        ({"shard_optimizer_over_data": True}, "'mpmd' and `shard_optimizer_over_data` is True"),
        (
            {"remat_policy": "qkv_proj_offloaded"},
            "'mpmd' and `remat_policy` 'qkv_proj_offloaded' offloads query_proj, key_proj, value_p",
        ),
        ({"remat_policy": "custom", "context": "offload"}, "'custom' offloads context, but"),
    ],
)
def test_keys_that_mean_nothing_to_it_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Config.model_validate(MPMD | settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"pipeline_schedule": "dualpipe", "num_pipeline_microbatches": 2},
            "'dualpipe'. `microbatches` is 2; to cross on every rank takes 4. Give at least 4",
        ),
        (
            {"pipeline_schedule": "seq1f1b", "dropout_rate": 0.1},
            "2 slices, but `dropout_rate` is 0.1, and masks of slices are not those of whole",
        ),
        ({"pipeline_schedule": "1f1"}, "`pipeline_schedule` is '1f1'. .* Did you mean '1f1b'"),
        ({"pipeline_layout": "Et|tt|tL"}, "number of stages in `pipeline_layout` is 3, not a mul"),
        (
            {"pipeline_schedule": "1f1b", "num_pipeline_repeats": 2},
            r"`num_pipeline_repeats` is 2, but `pipeline_schedule` 1f1b has 1 stage\(s\) of 2",
        ),
        (
            {"logical_axis_rules": (("embed", "stage"),)},
            "`logical_axis_rules` maps 'embed' to 'stage' and `pipeline_engine` is 'mpmd'",
        ),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_anything_compiles(settings, message):
    with pytest.raises(ValueError, match=message):
        setup_of(2, MPMD, settings)


def test_many_programs_are_not_compiled_ahead_as_one(capsys):
    with pytest.raises(ValueError, match="'mpmd', whose step is many programs"):
        compile_train_step(setup_of(2, ZBV).step)
    settings = TINY | ZBV | {"emulate_devices": 8, "ici_fsdp_parallelism": 4}
    words = [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in settings.items()]
    assert main(["compile", *words]) != 0
    assert "Give `pipeline_engine=scheduled`" in capsys.readouterr().err


def test_a_run_in_files_resumes_and_a_step_of_it_is_traced(tmp_path):
    settings = TINY | UNEVEN | {"output_dir": str(tmp_path), "per_device_batch_size": 1.0}
    settings |= {"ici_fsdp_parallelism": 4, "num_pipeline_microbatches": 2, "mpmd_trace_step": 2}
    settings |= {"learning_rate_schedule_steps": 3}

    def run_to(steps: int) -> tuple[str, dict[str, float]]:
        shown = io.StringIO()
        (metrics,) = train(Config.model_validate(settings | {"steps": steps}), stream=shown)
        return shown.getvalue(), metrics

    said, first = run_to(1)
    assert "resumed" not in said and "bubble_measured" not in first
    said, second = run_to(2)
    assert "resumed after step 1" in said
    assert 0 < second["bubble_predicted"] < 1 and 0 < second["bubble_measured"] < 1
    trace = json.loads((tmp_path / "default" / "trace_2.json").read_text())
    names = {event["args"].get("name") for event in trace["traceEvents"]}
    assert {"rank 0, measured", "rank 1, predicted"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16"])
def test_a_run_in_files_goes_on_with_another_engine_and_back(tmp_path, weight_dtype):
    base = TINY | {"output_dir": str(tmp_path), "per_device_batch_size": 1.0}
    base |= {"learning_rate_schedule_steps": 4, "num_pipeline_microbatches": 2}
    base |= {"weight_dtype": weight_dtype}
    shards: Settings = {"ici_fsdp_parallelism": 4, "ici_pipeline_parallelism": 2}

    def history(settings: Settings) -> tuple[list[float], str]:
        shown = io.StringIO()
        config = Config.model_validate(base | settings)
        return [metrics["loss"] for metrics in train(config, stream=shown)], shown.getvalue()

    first, text = history(shards | UNEVEN | {"steps": 1, "debug_sharding": True})
    assert "schedule 1f1b: " in text
    assert "stages.1.mlp.up: [3, 16, 32] over " in text
    second, text = history(shards | {"steps": 2})
    assert "resumed after step 1" in text
    third, _ = history(shards | ZBV | {"steps": 3})
    fourth, _ = history(shards | ZBV | {"steps": 4})
    whole, _ = history(shards | ZBV | {"steps": 4, "run_name": "whole"})
    tolerance = 1e-5 if weight_dtype == "float32" else 1e-2
    np.testing.assert_allclose(first + second + third + fourth, whole, rtol=tolerance)
