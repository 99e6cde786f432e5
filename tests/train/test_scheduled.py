"""The trainer's engine `scheduled`: any schedule, uneven stages, and states that go anywhere."""

import functools
import io
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxpipe import schedules, xla
from jaxpipe.cli import main
from jaxpipe.data import synthetic_batches
from jaxpipe.schedules import builders
from jaxpipe.train import Config, compile_train_step, train
from jaxpipe.train.logs import describe
from jaxpipe.train.plan import select_schedule
from jaxpipe.train.step import init_state, shard_batch, state_shapes

from .runs import (
    DEEPSEEK,
    DROPOUT,
    GEMMA,
    GPT_OSS,
    LLAMA4,
    MIXTURE,
    NONE,
    ROWS,
    TINY,
    Run,
    Settings,
    setup_of,
    three_steps,
)

pytestmark = pytest.mark.ci

SCHEDULED: Settings = {"pipeline_engine": "scheduled", "ici_pipeline_parallelism": 2}
CIRCULAR: Settings = {"ici_pipeline_parallelism": 2}
PER_LAYER: Settings = {"pipeline_fsdp_ag_per_layer": True}
ZBV: Settings = SCHEDULED | {"pipeline_schedule": "zbv"}
DUALPIPE: Settings = SCHEDULED | {"pipeline_schedule": "dualpipe"}
SLICES: Settings = SCHEDULED | {"pipeline_schedule": "seq1f1b", "num_pipeline_slices": 4}
UNEVEN: Settings = SCHEDULED | {"pipeline_schedule": "1f1b", "pipeline_layout": "Et|t*3L"}

# 1F1B, but rank 0 runs all its forwards first.
CSV = """0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3
1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3
"""
DATA_AND_FSDP: Settings = {
    "ici_pipeline_parallelism": 2,
    "ici_data_parallelism": 2,
    "ici_fsdp_parallelism": 2,
    "shard_optimizer_over_data": True,
    "num_pipeline_microbatches": 2,
}
# Devices and settings. Those with a text for a schedule read it from a file.
RUNS: dict[str, tuple[int, Settings]] = {
    "none": (1, NONE),
    "zbv, a V": (2, ZBV),
    "auto, which interleaves": (2, SCHEDULED),
    "slices": (2, SLICES),
    "uneven stages by a CSV": (2, UNEVEN | {"pipeline_schedule": CSV}),
    "a gather per layer, tensor 2": (
        4,
        SCHEDULED | PER_LAYER | {"pipeline_schedule": "1f1b", "ici_tensor_parallelism": 2},
    ),
    "dualpipe": (2, DUALPIPE | {"pipeline_layout": "Et|t*3L"}),
    "a gather per visit": (
        4,
        SCHEDULED
        | {"pipeline_schedule": "looped_bfs", "ici_fsdp_parallelism": 2}
        | {"pipeline_fsdp_ag_per_repeat": True},
    ),
}
SLOW: dict[str, tuple[int, Settings]] = {
    "circular": (2, CIRCULAR),
    "1f1b": (2, SCHEDULED | {"pipeline_schedule": "1f1b", "num_layers_per_pipeline_stage": 2}),
    "dualpipe, a gather per layer": (4, DUALPIPE | PER_LAYER | {"ici_fsdp_parallelism": 2}),
    "dualpipe, ZeRO-1, the loss on all ranks": (
        4,
        DUALPIPE
        | {"ici_data_parallelism": 2, "shard_optimizer_over_data": True}
        | {"pipeline_vocab_parallel": True},
    ),
    "slices, uneven, a gather per layer": (
        4,
        SLICES
        | PER_LAYER
        | {"pipeline_layout": "Et|t*3L", "ici_fsdp_parallelism": 2}
        | {"remat_policy": "minimal", "set_remat_policy_on_layers_per_stage": True},
    ),
    "slices, vocabulary parallel, a gather per visit": (
        4,
        SLICES
        | {"pipeline_fsdp_ag_per_repeat": True, "ici_fsdp_parallelism": 2}
        | {"pipeline_vocab_parallel": True, "remat_policy": "none"},
    ),
    "a V with empty ends": (2, ZBV | {"pipeline_layout": "E|t|ttt|L"}),
    "a gather per layer, ZeRO-1, explicit axes, a policy, uneven": (
        8,
        UNEVEN
        | PER_LAYER
        | DATA_AND_FSDP
        | {"remat_policy": "minimal", "set_remat_policy_on_layers_per_stage": True}
        | {"shard_mode": "explicit"},
    ),
    "circular, a gather per layer, ZeRO-1, explicit axes": (
        8,
        PER_LAYER | DATA_AND_FSDP | {"num_layers_per_pipeline_stage": 2, "shard_mode": "explicit"},
    ),
    "layers after an uneven pipeline": (
        2,
        SCHEDULED | {"pipeline_parallel_layers": 3, "pipeline_layout": "Ett|tL"},
    ),
    "dropout, none": (1, DROPOUT | NONE),
    "dropout, uneven": (2, DROPOUT | ZBV | {"pipeline_layout": "Et|t|tt|L"}),
    "deepseek, none": (1, DEEPSEEK | NONE),
    "deepseek, uneven": (4, DEEPSEEK | UNEVEN | PER_LAYER | {"ici_expert_parallelism": 2}),
    "qwen3_moe, none": (1, MIXTURE | NONE),
    "qwen3_moe, uneven": (4, MIXTURE | UNEVEN | PER_LAYER | {"ici_expert_parallelism": 2}),
    "qwen3_moe, circular": (4, MIXTURE | CIRCULAR | {"ici_expert_parallelism": 2}),
    "gemma3, none": (1, GEMMA | NONE | {"pipeline_parallel_layers": -1}),
    "gpt_oss, none": (1, GPT_OSS | NONE),
    "llama4, none": (1, LLAMA4 | NONE),
    "llama4, uneven": (4, LLAMA4 | UNEVEN | PER_LAYER | {"ici_expert_parallelism": 2}),
    "gpt_oss, uneven": (4, GPT_OSS | UNEVEN | PER_LAYER | {"ici_expert_parallelism": 2}),
    "gemma3, uneven": (4, GEMMA | UNEVEN | PER_LAYER | {"ici_fsdp_parallelism": 2}),
    "gemma3, circular": (
        4,
        GEMMA
        | CIRCULAR
        | {"num_layers_per_pipeline_stage": 2, "ici_tensor_parallelism": 2}
        | {"remat_policy": "none"},
    ),
    "gemma3, slices": (
        2,
        GEMMA
        | SLICES
        | {"pipeline_parallel_layers": -1, "pipeline_layout": "Ett|tttL"}
        | {"pipeline_vocab_parallel": True},
    ),
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


@pytest.mark.parametrize("name", [*marked(*RUNS, *SLOW)])
def test_losses_are_those_of_the_run_without_a_pipeline(name):
    family = f"{name.split(',')[0]}, none"
    plain, metrics = run(family if family in SLOW else "none").metrics, run(name).metrics
    assert metrics[0].keys() == plain[0].keys()
    for key, value in plain[0].items():
        np.testing.assert_allclose(metrics[0][key], value, rtol=1e-5, err_msg=key)
    found, expected = ([of_step["loss"] for of_step in of_run] for of_run in (metrics, plain))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        *marked(
            "none -> uneven stages by a CSV",
            "zbv, a V -> none",
            "uneven stages by a CSV -> zbv, a V",
            "zbv, a V -> circular",
            "circular -> a V with empty ends",
            "circular -> dualpipe, a gather per layer",
            "dualpipe, ZeRO-1, the loss on all ranks -> dualpipe",
            "a V with empty ends -> circular",
            "layers after an uneven pipeline -> zbv, a V",
            "gemma3, slices -> gemma3, circular",
            "gemma3, circular -> gemma3, uneven",
            "circular, a gather per layer, ZeRO-1, explicit axes"
            " -> a gather per layer, ZeRO-1, explicit axes, a policy, uneven",
        )
    ],
)
def test_a_run_goes_on_under_another_schedule_and_engine(writer, reader):
    plain = "gemma3, none" if reader.startswith("gemma3") else "none"
    np.testing.assert_allclose(run(reader).go_on(run(writer).saved), losses(plain)[2], rtol=1e-5)


@pytest.mark.parametrize("name", [*marked(*RUNS, "circular", "a V with empty ends")])
def test_every_layout_starts_from_the_same_canonical_state(name):
    jax.tree.map(np.testing.assert_array_equal, run(name).first, run("none").first)


def test_places_without_a_layer_stay_zero():
    found = run("uneven stages by a CSV")
    layout = found.setup.pipeline.layout
    assert layout.counts == (1, 3)
    assert layout.layer_ids == (0, -1, -1, 1, 2, 3)
    absent = np.reshape(layout.layer_ids, layout.dims) < 0
    adam = next(part for part in found.last["optimizer"] if hasattr(part, "mu"))
    for tree in (found.last["weights"], adam.mu, adam.nu):
        for leaf in map(np.asarray, jax.tree.leaves(tree["stages"])):
            assert not leaf[absent].any()
            assert leaf[~absent].any()


def test_places_without_a_layer_are_no_parameters_and_the_run_tells_how_uneven_it_is():
    plain, uneven, even = (setup_of(n, s) for n, s in ((1, NONE), (2, UNEVEN), (2, ZBV)))
    leaves = jax.tree.leaves(state_shapes(plain.state)["weights"])
    assert plain.state.weights.num_parameters == sum(leaf.size for leaf in leaves)
    assert (
        uneven.state.weights.num_parameters
        == even.state.weights.num_parameters
        == plain.state.weights.num_parameters
    )
    first, second, _, third = describe(uneven, 0).splitlines()
    assert first == describe(plain, 0).splitlines()[0]
    assert "engine scheduled on stage 2: 1 repeat(s) x 2 rank(s) x 1 to 3 layer(s), 4" in second
    assert third.startswith("schedule 1f1b: 6 ticks, bubble ")
    assert "schedule zbv: 14 ticks, " in describe(even, 0)


def test_layers_that_are_spread_evenly_by_a_layout_need_no_condition():
    setup = setup_of(2, SCHEDULED, {"pipeline_layout": "Ett|ttL"})
    assert setup.pipeline.layout.counts is None
    assert setup.pipeline.layout.dims == (1, 2, 2)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "layers", "settings", "words"),
    [
        (2, 4, 4, {}, "interleaved_1f1b with 2 stages per rank: 12 ticks, bubble 11.1% in lock-st"),
        (
            *(2, 4, 2, {"pipeline_schedule": "seq1f1b"}),
            "seq1f1b: 11 ticks, bubble 11.1% in lock-step, 4 stage inputs held at most, each of 1",
        ),
        (2, 4, 2, {}, "1f1b: 6 ticks, bubble 20.0% in lock-step, 3 stage inputs held at most"),
        (2, 64, 4, {}, "1f1b: "),
        (1, 4, 4, {}, "1f1b: "),
        (4, 4, 16, {}, "interleaved_1f1b with 4 stages per rank: "),
        (4, 4, 16, {"num_pipeline_repeats": 2}, "interleaved_1f1b with 2 stages per rank: "),
        (4, 4, 16, {"num_pipeline_repeats": 1}, "1f1b: "),
        (4, 4, 16, {"num_layers_per_pipeline_stage": 2}, "interleaved_1f1b with 2 stages per"),
        (4, 7, 16, {}, "interleaved_1f1b with "),
        (3, 7, 12, {}, "1f1b: "),
    ],
)
def test_auto_takes_more_stages_per_rank_while_they_save_time_and_says_so(
    ranks, microbatches, layers, settings, words
):
    config = Config.model_validate(settings | {"pipeline_engine": "scheduled"})
    found = select_schedule(config, ranks, microbatches, layers)
    assert found.reason.startswith(words)
    assert schedules.num_ranks(found.schedule) == ranks


def test_a_name_has_as_many_stages_as_layers_unless_the_config_says_how_many():
    def dims(settings: Settings) -> tuple[int, ...]:
        more = {"pipeline_schedule": "interleaved_1f1b", "base_num_decoder_layers": 8}
        return setup_of(2, SCHEDULED, more, settings).pipeline.layout.dims

    assert dims({}) == (4, 2, 1)
    assert dims({"num_layers_per_pipeline_stage": 2}) == dims({"num_pipeline_repeats": 2})
    assert dims({"num_pipeline_repeats": 2}) == (2, 2, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"pipeline_schedule": "dualpipe", "num_pipeline_microbatches": 2},
            "'dualpipe'. `microbatches` is 2; to cross on every rank takes 4. Give at least 4",
        ),
        (
            {"pipeline_schedule": "seq1f1b", "num_pipeline_slices": 3},
            r"seq1f1b cuts sequences into 3 slices, but `max_target_length` is \d+, which they do",
        ),
        (
            {"pipeline_schedule": "seq1f1b", "dropout_rate": 0.1},
            "2 slices, but `dropout_rate` is 0.1, and masks of slices are not those of whole",
        ),
        (
            {"pipeline_schedule": "seq1f1b", "pipeline_parallel_layers": 2},
            "2 slices, but `pipeline_parallel_layers` is 2, and layers after the pipeline need",
        ),
        (
            {"pipeline_schedule": "1f1b", "num_pipeline_slices": 2},
            r"`num_pipeline_slices` is 2, but `pipeline_schedule` 1f1b has 1 slice\(s\)",
        ),
        ({"pipeline_schedule": "1f1"}, "`pipeline_schedule` is '1f1'. .* Did you mean '1f1b'"),
        ({"pipeline_schedule": "zero_bubble_h2", "num_pipeline_microbatches": 2}, "'zero_bubble_h"),
        (
            {"pipeline_schedule": "zbv", "pipeline_fsdp_ag_per_repeat": True},
            "`pipeline_fsdp_ag_per_repeat` is true and `pipeline_schedule` is 'zbv', which splits",
        ),
        (
            {"pipeline_schedule": "1f1b", "num_pipeline_repeats": 2},
            r"`num_pipeline_repeats` is 2, but `pipeline_schedule` 1f1b has 1 stage\(s\) of 2",
        ),
        (
            {"pipeline_schedule": "zbv", "num_layers_per_pipeline_stage": 2},
            "`num_layers_per_pipeline_stage` is 2, but .* Give 1",
        ),
        ({"num_pipeline_repeats": 3}, "is 4, not a multiple of the stages of .* = 6"),
        ({"base_num_decoder_layers": 5}, "is 5, not a multiple of .* `pipeline_parallel_layers=4`"),
        ({"pipeline_layout": "Et|ttL"}, "`pipeline_layout` has 3 layers and `base_num_decoder_la"),
        (
            {"pipeline_layout": "Ett|ttL", "pipeline_parallel_layers": 3},
            "has 4 layers and `pipeline_parallel_layers` is 3",
        ),
        ({"pipeline_layout": "Et|tt|tL"}, "number of stages in `pipeline_layout` is 3, not a mul"),
        (
            {"pipeline_layout": "Ett|ttL", "pipeline_schedule": "zbv"},
            "`pipeline_layout` has 2 stages and `pipeline_schedule` zbv has 4. They must be equal",
        ),
        (
            {"pipeline_layout": "Et|t|t|tL", "pipeline_schedule": "1f1b"},
            "`pipeline_layout` has 4 stages and `pipeline_schedule` 1f1b has 2",
        ),
        ({"pipeline_layout": "Ett|tmL"}, "m is a layer that predicts further tokens"),
        ({"pipeline_layout": "tt|tt"}, "The first stage begins with the one E"),
    ],
)
def test_a_schedule_or_layout_that_cannot_be_is_refused_before_anything_compiles(settings, message):
    with pytest.raises(ValueError, match=message):
        setup_of(2, SCHEDULED, settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1B0\n", "is for 2 ranks and 1 microbatches, but the mesh has 2 ranks and"),
        (schedules.to_csv(builders.one_f_one_b(4, 4)), "is for 4 ranks and 4 microbatches"),
        (
            schedules.to_csv(
                schedules.parse("0F0 0B0 2F0 2B0\n1F0 1B0".replace("0B0 2F0 2B0", "2F0 2B0 0B0"))
            ),
            "is for 2 ranks and 1 micro",
        ),
        (CSV.replace("1B0,", ""), "No rank runs 1"),
        ("hello\n", "Row 1, cell 1: 'hello' is not an action"),
    ],
)
def test_a_file_that_does_not_suit_the_run_is_refused(tmp_path, text, message):
    file = tmp_path / "schedule.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        setup_of(2, SCHEDULED, {"pipeline_schedule": str(file)})


def test_a_file_with_more_stages_on_one_rank_than_on_another_is_refused(tmp_path):
    file = tmp_path / "schedule.csv"
    file.write_text("0F0,2F0,2B0,0B0\n1F0,1B0\n")
    more = {"pipeline_schedule": str(file), "num_pipeline_microbatches": 1}
    with pytest.raises(ValueError, match=r"schedule.csv'. Ranks hold 2, 1 stages"):
        setup_of(2, SCHEDULED, more)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (SCHEDULED | {"pipeline_delay_activation_forwarding": True}, "`pipeline_delay_activation"),
        (SCHEDULED | {"scan_pipeline_repeats": False}, "'scheduled' and `scan_pipeline_repeats` i"),
        (
            {"pipeline_engine": "circular", "pipeline_schedule": "1f1b"},
            "'circular' and `pipeline_schedule` is '1f1b', which it d",
        ),
        ({"pipeline_layout": "Et|tL"}, "'circular' and `pipeline_layout` is .*engine=scheduled`"),
        ({"pipeline_engine": "none", "pipeline_schedule": "zbv"}, "'none' and `pipeline_schedule"),
        ({"pipeline_engine": "none", "pipeline_layout": "EtL"}, "'none' and `pipeline_layout` is"),
        (PER_LAYER | {"pipeline_engine": "none"}, "'none' and `pipeline_fsdp_ag_per_layer` is"),
        (PER_LAYER | {"pipeline_fsdp_ag_once": True}, "ag_once` and .*_layer` are both true"),
        (PER_LAYER | {"pipeline_fsdp_ag_per_repeat": True}, "ag_per_repeat` and .*ag_per_layer` a"),
        (UNEVEN | {"num_pipeline_repeats": 1}, "Leave `num_pipeline_repeats` at -1 and"),
        (UNEVEN | {"num_layers_per_pipeline_stage": 2}, "which says how many stages and layers"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Config.model_validate(settings)


@pytest.mark.slow
def test_a_run_in_files_says_its_schedule_and_goes_on_with_another_engine(tmp_path):
    base = TINY | {"output_dir": str(tmp_path), "per_device_batch_size": 1.0}
    base |= {"learning_rate_schedule_steps": 3, "num_pipeline_microbatches": 2}
    shards: Settings = {"ici_fsdp_parallelism": 4, "ici_pipeline_parallelism": 2}

    def history(settings: Settings) -> tuple[list[float], str]:
        shown = io.StringIO()
        config = Config.model_validate(base | settings)
        return [metrics["loss"] for metrics in train(config, stream=shown)], shown.getvalue()

    first, text = history(shards | UNEVEN | {"steps": 1, "debug_sharding": True})
    assert "schedule 1f1b: " in text
    second, text = history(shards | {"steps": 2})
    assert "resumed after step 1" in text
    third, _ = history(shards | ZBV)
    plain, _ = history(
        NONE | {"num_pipeline_microbatches": 1, "ici_fsdp_parallelism": 8, "run_name": "a"}
    )
    np.testing.assert_allclose(first + second + third, plain, rtol=1e-5)


@pytest.mark.slow
def test_a_step_of_uneven_stages_is_compiled_ahead(capsys):
    settings = {**TINY, **UNEVEN, **PER_LAYER, "ici_fsdp_parallelism": 4, "emulate_devices": 8}
    settings |= {"per_device_batch_size": 2.0}
    words = [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in settings.items()]
    assert main(["compile", *words]) == 0
    text = capsys.readouterr().out
    assert "1 repeat(s) x 2 rank(s) x 1 to 3 layer(s)" in text
    assert "schedule 1f1b: 6 ticks" in text


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "none"])
@pytest.mark.parametrize("engine", [SCHEDULED | {"pipeline_schedule": "1f1b"}, CIRCULAR])
def test_no_two_layers_are_whole_at_a_time_and_a_backward_gathers_again(engine, policy):
    shapes = {"base_num_decoder_layers": 8, "base_emb_dim": 24, "base_mlp_dim": 48}
    more = {"num_layers_per_pipeline_stage": 4, "ici_fsdp_parallelism": 2, "remat_policy": policy}
    setup = setup_of(4, engine, PER_LAYER, shapes, more)
    text = compile_train_step(setup.step).as_text() or ""
    assert re.search(r"\[4,12,48\]", text)
    assert not re.search(r"[\[,]4,24,48\]", text)
    totals = xla.totals(xla.audit(text))
    # The table of embedding and head once, everything else in the forward and in the backward,
    # and once more where a stage runs again in between.
    times = {"full": 3, "none": 2}[policy]
    scatters = totals["reduce-scatter"].executions - 1
    assert totals["all-gather"].executions == 1 + times * scatters


@pytest.mark.parametrize("engine", [SCHEDULED | {"pipeline_schedule": "1f1b"}, CIRCULAR])
def test_gradients_over_data_are_summed_after_all_ticks_that_add_to_them(engine):
    shapes = {"base_num_decoder_layers": 8, "ici_data_parallelism": 2}
    setup = setup_of(4, engine, shapes, {"num_pipeline_microbatches": 4})
    text = compile_train_step(setup.step).as_text() or ""
    reduced = xla.totals(xla.audit(text))["all-reduce"]
    weights = init_state(setup.step)["weights"]
    assert 0 < reduced.result_bytes < sum(x.nbytes for x in jax.tree.leaves(weights))


def test_masks_of_layers_do_not_store_weights():
    def temporary(settings: Settings) -> int:
        shapes = {"base_num_decoder_layers": 4, "base_emb_dim": 128, "base_mlp_dim": 512}
        policy = {
            "set_remat_policy_on_pipeline_iterations": False,
            "set_remat_policy_on_layers_per_stage": True,
            "remat_policy": "full",
            "num_pipeline_microbatches": 4,
        }
        step = compile_train_step(setup_of(2, settings, shapes, policy).step)
        memory: Any = step.memory_analysis()
        return memory.temp_size_in_bytes

    even = temporary(SCHEDULED | {"pipeline_schedule": "1f1b"})
    # Half as many layers more on the larger stage, and not a copy of its weights per microbatch.
    assert temporary(UNEVEN) < 1.7 * even


@pytest.mark.slow
def test_what_is_compiled_ahead_is_the_step_of_the_run():
    found = run("zbv, a V")
    ahead = compile_train_step(found.setup.step)
    batch_at = synthetic_batches(vocab_size=64, batch_size=ROWS, length=16, seed=0)
    batch = shard_batch(found.setup.batch, batch_at(0))
    assert float(ahead(init_state(found.setup.step), batch)[1]["loss"]) == losses("zbv, a V")[0]
