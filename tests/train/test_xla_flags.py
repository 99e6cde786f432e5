"""XLA's options for the step, from flags."""

import jax
import pytest

from jaxpipe.cli import main
from jaxpipe.train import Config, set_up
from jaxpipe.train.config import parse_xla_flags
from jaxpipe.train.step import make_train_step


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


@pytest.mark.parametrize("command", ["compile", "train"])
def test_an_option_that_xla_does_not_know_is_named(command, capsys, tmp_path):
    settings = (
        "dtype=float32 base_emb_dim=16 base_num_decoder_layers=1 max_target_length=8 vocab_size=32"
    )
    flags = "compile_xla_flags=--xla_no_such_thing=1"
    run = ["pipeline_engine=none", "per_device_batch_size=1", f"output_dir={tmp_path}", flags]
    assert main([command, *settings.split(), *run]) == 2
    assert "`compile_xla_flags` has an option that XLA does not" in capsys.readouterr().err
