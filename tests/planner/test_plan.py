"""`jaxpipe plan`: what it answers, that the trainer accepts it, and what it refuses."""

import inspect
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxpipe as jp
from jaxpipe.cli import main
from jaxpipe.models import PRESETS
from jaxpipe.schedules import FAMILIES
from jaxpipe.train import load_config, read_metrics, train

TINY = ["model_name=llama-tiny", "--devices", "v5p-16", "--batch", "32", "--sequence", "64"]


def test_a_preset_is_planned_and_the_plan_says_what_it_costs(capsys: pytest.CaptureFixture):
    assert main(["plan", "model_name=llama2-7b", "ici_pipeline_parallelism=2", *_sizes()]) == 0
    shown = capsys.readouterr().out
    assert "llama2-7b, 6.74 billion parameters, on v5p-8: 4 devices of 102.0 GB" in shown
    assert "What binds:" in shown and "Why not 2:" in shown
    assert "pp 2" in shown


def _sizes() -> list[str]:
    return ["--devices", "v5p-8", "--batch", "48", "--sequence", "2048", "--top", "3"]


def test_plans_are_json(capsys: pytest.CaptureFixture):
    assert main(["plan", *TINY, "--json", "--top", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    seconds = [plan["step_seconds"] for plan in found["plans"]]
    assert seconds == sorted(seconds) and len(seconds) == 2
    for plan in found["plans"]:
        kinds = plan["memory_bytes"]
        assert kinds.pop("total") == pytest.approx(sum(kinds.values()))
        assert plan["step_seconds"] == pytest.approx(sum(plan["seconds_by_kind"].values()))


def test_the_settings_of_a_plan_train(tmp_path: Path, capsys: pytest.CaptureFixture):
    file = tmp_path / "plan.yml"
    fixed = ["ici_pipeline_parallelism=2", "--schedule", "1f1b", "dtype=float32"]
    assert main(["plan", *TINY, *fixed, "--write", str(file)]) == 0
    capsys.readouterr()
    pairs = ["steps=2", f"output_dir={tmp_path}", "run_name=run", "enable_checkpointing=false"]
    config = load_config([file], pairs, presets=PRESETS)
    assert config.pipeline_engine == "scheduled" and config.ici_pipeline_parallelism == 2
    train(config)
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 2


def test_what_is_given_is_kept():
    plans = jp.plan(
        "llama2-7b",
        "v5p-64",
        256,
        4096,
        schedule="interleaved_1f1b",
        ici_tensor_parallelism=2,
        num_pipeline_repeats=4,
        num_pipeline_microbatches=8,
        learning_rate=1e-4,
        num_plans=3,
    )
    for plan in plans.plans:
        given = plan.settings
        assert given["pipeline_schedule"] == "interleaved_1f1b"
        assert given["ici_tensor_parallelism"] == 2 and given["num_pipeline_repeats"] == 4
        assert given["num_pipeline_microbatches"] == 8 and given["learning_rate"] == 1e-4
        assert given["per_device_batch_size"] == 8.0


def test_circular_is_the_schedule_of_its_engine():
    plans = jp.plan("llama2-7b", "v5p-8", 48, 2048, schedule="circular")
    assert {plan.settings["pipeline_engine"] for plan in plans.plans} == {"circular"}


def test_less_memory_takes_other_plans_and_too_little_says_by_how_much():
    wide = jp.plan("llama2-7b", "v5p-8", 48, 2048, num_plans=1).best
    narrow = jp.plan("llama2-7b", "v5p-8", 48, 2048, num_plans=1, memory_gb=35).best
    assert narrow.memory.total < 35e9 < wide.memory.total
    assert narrow.time.seconds > wide.time.seconds
    with pytest.raises(ValueError, match=r"No layout fits: the leanest .* GB too much: optimizer"):
        jp.plan("llama2-7b", "v5p-8", 48, 2048, memory_gb=10)


def test_a_stage_that_is_computed_again_twice_takes_longer_and_less_memory():
    fixed = {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2, "remat_policy": "full"}
    fixed |= {"pipeline_fsdp_ag_once": True, "num_pipeline_microbatches": 8}
    layers, both = (
        jp.plan(
            {
                "model_name": "llama2-7b",
                "set_remat_policy_on_layers_per_stage": True,
                "set_remat_policy_on_pipeline_iterations": on_ticks,
                **fixed,
            },
            *("v5p-8", 48, 2048),
            schedule="1f1b",
        ).best
        for on_ticks in (False, True)
    )
    assert both.time.seconds > 1.1 * layers.time.seconds
    assert both.memory.total < layers.memory.total


def test_the_trainer_may_choose_the_schedule_of_an_engine_that_runs_any():
    """`auto` is a value of `pipeline_schedule`, and the name of no family."""
    plan = jp.plan("llama2-7b", "v5p-8", 48, 2048, schedule="auto", ici_pipeline_parallelism=4).best
    assert plan.settings["pipeline_engine"] == "scheduled"
    assert plan.candidate.schedule in FAMILIES


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--devices", "v5p"], "counts TensorCores"),
        (["--devices", "h100:8", "--num-slices", "2"], "without slices"),
        (["--devices", "v5p-8", "nonsense=1"], "no key"),
        (["--devices", "v5p-8", "--schedule", "best"], "no schedule"),
        (
            ["--devices", "v5p-8", "--batch", "7", "--max-stages", "1"],
            "No layout of 4 devices divides 7 sequences",
        ),
        (["--topology", "v5p:2x2x1", "ici_fsdp_parallelism=3"], "given (fsdp 3) multiply to 3"),
        (
            ["--devices", "v5p-8", "pipeline_engine=mpmd", "reduce_dtype=bfloat16"],
            "`pipeline_engine` is 'mpmd', which does not read `reduce_dtype`. Leave one",
        ),
        (
            ["--devices", "v5p-8", "pipeline_engine=circular", "pipeline_schedule=1f1b"],
            "`pipeline_engine` is 'circular', which does not read `pipeline_schedule`",
        ),
        (
            ["--devices", "v5p-8", "--schedule", "1f1b", "scan_pipeline_iterations=false"],
            "'1f1b', whose engine 'scheduled' does not read `scan_pipeline_iterations`",
        ),
        (["--devices", "v5p-8", "--schedule", "nonsense"], "There is no schedule 'nonsense'."),
        (
            ["--devices", "v5p-8", "--max-stages=1", "scan_pipeline_iterations=false"],
            "`scan_pipeline_iterations` is not read by 'none', 'scheduled', 'mpmd'.",
        ),
    ],
)
def test_what_cannot_be_planned_is_said(
    settings: list[str], message: str, capsys: pytest.CaptureFixture
):
    assert main(["plan", "model_name=llama-tiny", *settings]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("v5p-8", "llama2-7b"),
            "`devices` 'llama2-7b', which is a model. .*: give the model first",
        ),
        (("llama2-7b", 64, "v5p-8"), "`devices` is 64. Give a name such as 'v5p-64'"),
        (("llama2-7b", "v6e:3x3"), "v6e:4x4 in hosts of 2 x 2 chips"),
        (("llama2-7b", "v5p-8", "64"), "`batch` is '64'. Give the number of sequences of a step"),
        (
            ("llama2-7b", "v5p-8", 64, {}),
            r"`sequence` is {}. .*plan\(model, devices, batch, sequence\)",
        ),
        ((None, "v5p-8"), "`model` is None. Give the name of a preset, the keys of a run, a"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(jp.plan)(*arguments)


def test_a_model_of_plain_functions_is_traced_and_planned():
    D, F, V, T = 64, 256, 512, 32

    def layer(w, x, batch):
        del batch
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"]

    def loss(w, x, batch):
        logits = jax.nn.log_softmax(x @ w)
        return -jnp.mean(jnp.take_along_axis(logits, batch["tokens"][..., None], -1))

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    model = jp.Model(embed=lambda w, batch: w[batch["tokens"]], layer=layer, loss=loss)
    layers = [{"up": shape(D, F), "down": shape(F, D)} for _ in range(8)]
    params = {"embed": shape(V, D), "layers": layers, "head": shape(D, V)}
    example = {"tokens": jax.ShapeDtypeStruct((4, T), jnp.int32)}
    plans = jp.plan(model, "v5p-8", 64, params=params, example=example, schedule="1f1b")
    work = plans.request.work
    assert work.parameters == 2 * V * D + 8 * 2 * D * F
    assert [(p.k, p.n) for p in work.layers[0].products] == [(D, F), (F, D)]
    assert (work.hidden, work.vocab, plans.request.sequence) == (D, V, T)
    settings = plans.best.settings
    assert settings["schedule"] == "1f1b" and settings["mesh"]["stage"] > 1
    with pytest.raises(ValueError, match="Give its `params`"):
        jp.plan(model, "v5p-8", 64)


_ONE = ["ici_pipeline_parallelism=2", "--top", "1", "--verify", "1"]


@pytest.mark.slow
def test_a_plan_is_verified_by_the_compiler(capsys: pytest.CaptureFixture):
    given = ["model_name=llama-tiny", "--devices", "here", "--batch", "32", "--sequence", "64"]
    assert main(["plan", *given, "dtype=float32", *_ONE]) == 0
    assert "compiled 1: " in capsys.readouterr().out


def test_a_given_layout_of_stages_is_planned_or_refused():
    given = {"model_name": "llama2-7b", "ici_pipeline_parallelism": 2}
    found = jp.plan(given | {"pipeline_layout": "Et*17|t*15L"}, "v5p-8", 48, 2048)
    assert {plan.settings["pipeline_layout"] for plan in found.plans} == {"Et*17|t*15L"}
    assert {plan.candidate.counts for plan in found.plans} == {(17, 15)}
    with pytest.raises(ValueError, match=r"`pipeline_layout` has 31 layers, .* pipeline 32"):
        jp.plan(given | {"pipeline_layout": "Et*17|t*14L"}, "v5p-8", 48, 2048)
    with pytest.raises(ValueError, match=r"layers of stages \(8, 8, 16\)"):
        jp.plan(given | {"pipeline_layout": "Et*8|t*8|t*16L"}, "v5p-8", 48, 2048)
