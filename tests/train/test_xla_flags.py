"""XLA's options for the step, from flags."""

import json

import jax
import jax.numpy as jnp
import pytest

import jaxpipe.train
from jaxpipe import mpmd
from jaxpipe.cli import main
from jaxpipe.train import Config, set_up
from jaxpipe.train.config import parse_xla_flags
from jaxpipe.train.plan import compiler_options, step_traits
from jaxpipe.train.step import lower_train_step, make_train_step


def test_flags_become_options_and_a_bare_one_means_true():
    flags = "--xla_a=true  --xla_b=2 --xla_c --xla_d="
    options = {"xla_a": "True", "xla_b": "2", "xla_c": "True", "xla_d": ""}
    assert parse_xla_flags(flags) == options
    assert parse_xla_flags("") == {}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("xla_a=1", "in which 'xla_a=1' is no flag"),
        ("--=1", "in which '--=1' is no flag"),
        ("--xla_a=1 --xla_a=2", "in which '--xla_a=2' comes twice"),
    ],
)
def test_what_is_no_flag_is_refused_before_anything_runs(flags, message):
    with pytest.raises(ValueError, match=message):
        Config.model_validate({"compile_xla_flags": flags})


def test_they_reach_the_compiler(monkeypatch):
    seen = {}
    monkeypatch.setattr(jax, "jit", lambda f, **options: seen.update(options) or f)
    config = Config.model_validate({"compile_xla_flags": "--xla_a=1", "ici_fsdp_parallelism": 1})
    make_train_step(set_up(config, jax.devices()[:1]).step)
    assert seen["compiler_options"] == {"xla_a": "1"}


def test_they_reach_the_compiler_of_programs_of_ranks(monkeypatch):
    class ReachedError(Exception):
        pass

    def mpmd_jit(*_, compiler_options, **__):
        raise ReachedError(compiler_options)

    monkeypatch.setattr(mpmd, "mpmd_jit_with_loop", mpmd_jit)
    settings = {"pipeline_engine": "mpmd", "ici_pipeline_parallelism": 2, "dtype": "float32"}
    config = Config.model_validate(settings | {"compile_xla_flags": "--xla_a=1"})
    plan = set_up(config, jax.devices()[:2]).step
    with pytest.raises(ReachedError) as reached:
        lower_train_step(plan)
    (options,) = reached.value.args
    assert options == {"xla_cpu_parallel_codegen_split_count": "1", "xla_a": "1"}


def test_defaults_depend_on_the_bytes_of_a_layer():
    config = Config.model_validate({"dtype": "bfloat16", "base_emb_dim": 16, "base_mlp_dim": 64})
    heads = config.base_num_query_heads + config.base_num_kv_heads
    layer = 2 * 16 * heads * config.head_dim + 3 * 16 * 64 + 2 * 16
    assert step_traits(config, jax.devices()[0]).layer_bytes == 2 * layer


def test_they_win_over_defaults():
    name = "xla_cpu_parallel_codegen_split_count"
    config = Config.model_validate(
        {"pipeline_engine": "mpmd", "compile_xla_flags": f"--{name}=4 --xla_a"}
    )
    options = compiler_options(config, jax.devices()[0])
    assert options == {name: "4", "xla_a": "True"}


@pytest.mark.parametrize("command", ["compile", "train"])
def test_flags_are_printed_with_their_reasons(command, capsys):
    assert main([command, "compile_xla_flags=--xla_a=1", "--print-flags"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        f"cpu, engine circular, jax {jax.__version__}\nset      --xla_a=1 (yours)"
    )
    assert "not set  --xla_cpu_parallel_codegen_split_count=1\n" in text


def compile_add(plan):
    """Compiles a small program as the train step would be compiled."""
    step = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((4,), jnp.float32))
    return step.compile(compiler_options=dict(plan.pipeline.compiler_options or ()))


@pytest.mark.parametrize(
    "compile_step", [compile_add, pytest.param(None, marks=pytest.mark.slow)], ids=["add", "real"]
)
def test_flags_are_probed(compile_step, capsys, monkeypatch):
    if compile_step is not None:
        monkeypatch.setattr(jaxpipe.train, "compile_train_step", compile_step)
    settings = (
        "dtype=float32 base_emb_dim=16 base_num_decoder_layers=1 max_target_length=8 vocab_size=32"
    )
    run = ["pipeline_engine=none", "per_device_batch_size=1", "--probe-flags", "--json"]
    assert main(["compile", *settings.split(), *run]) == 0
    groups = json.loads(capsys.readouterr().out)
    assert [group["flags"] for group in groups] == ["none", "one thread", "memory order"]
    assert all(group["memory"]["peak_bytes"] > 0 for group in groups)
    assert groups[1]["options"] == {"xla_cpu_parallel_codegen_split_count": "1"}


@pytest.mark.parametrize("command", ["compile", "train"])
def test_an_option_that_xla_does_not_know_is_named(command, capsys, tmp_path):
    settings = (
        "dtype=float32 base_emb_dim=16 base_num_decoder_layers=1 max_target_length=8 vocab_size=32"
    )
    flags = "compile_xla_flags=--xla_no_such_thing=1"
    run = ["pipeline_engine=none", "per_device_batch_size=1", f"output_dir={tmp_path}", flags]
    assert main([command, *settings.split(), *run]) == 2
    assert "`compile_xla_flags` has an option that XLA does not" in capsys.readouterr().err
