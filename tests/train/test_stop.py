"""Runs that end before their last step: signals, time, bad numbers; and steps that are skipped."""

import io
import math
import os
import re
import signal
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpipe.cli import main
from jaxpipe.train import Config, RunError, read_metrics, train
from jaxpipe.train.config import parse_profile_steps
from jaxpipe.train.loop import read_starts
from jaxpipe.train.runtime import StopRequests, TerminatedError, bad_step_reason, check_step
from jaxpipe.train.step import init_state, make_train_step, shard_batch

from .runs import NONE, ROWS, TINY, setup_of

pytestmark = pytest.mark.ci

# The plain run of this file is run again and again.
SETTINGS = TINY | NONE | {"ici_fsdp_parallelism": 8, "per_device_batch_size": 1.0}
SETTINGS |= {"num_pipeline_microbatches": 1}


class Terminating(io.StringIO):
    """Sends a signal once a step is done, so that the run is in its loop."""

    def __init__(self, number: signal.Signals = signal.SIGTERM) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        if re.search(r"step +3/300 ", text):
            os.kill(os.getpid(), self.number)
        return super().write(text)


def words(**settings) -> list[str]:
    """For a command line."""
    pairs = (SETTINGS | settings).items()
    return [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in pairs]


def run(folder: Path, **settings) -> tuple[list[dict[str, float]], str]:
    shown = io.StringIO()
    config = SETTINGS | {"output_dir": str(folder)} | settings
    return train(Config.model_validate(config), stream=shown), shown.getvalue()


def losses(history) -> list[float]:
    return [metrics["loss"] for metrics in history]


def test_sigterm_ends_a_run_after_its_step_with_a_checkpoint_and_it_resumes_bit_for_bit(tmp_path):
    settings = {"steps": 300, "learning_rate_schedule_steps": 8}
    before = signal.getsignal(signal.SIGTERM)
    shown = Terminating()
    config = Config.model_validate(SETTINGS | settings | {"output_dir": str(tmp_path / "a")})
    with pytest.raises(TerminatedError, match="SIGTERM has ended the run after step"):
        train(config, stream=shown)
    first = read_metrics(tmp_path / "a" / "default" / "metrics.jsonl")
    assert 3 <= len(first) < 300
    assert f"stopped after step {len(first)}: start again to go on" in shown.getvalue()
    assert (tmp_path / "a" / "default" / "checkpoints" / str(len(first))).is_dir()
    assert signal.getsignal(signal.SIGTERM) == before

    steps = len(first) + 2
    second, said = run(tmp_path / "a", **settings | {"steps": steps})
    assert f"resumed after step {len(first)}" in said
    starts = read_starts(tmp_path / "a" / "default")
    assert [start["first_step"] for start in starts] == [1, len(first) + 1]
    whole, _ = run(tmp_path / "b", **settings | {"steps": steps})
    assert losses(first) + losses(second) == losses(whole)


def test_the_command_tells_by_its_exit_code_which_signal_has_ended_a_run(
    tmp_path, monkeypatch, handlers, capsys
):
    steps, same = 0, {}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        monkeypatch.setattr("sys.stdout", shown := Terminating(number))
        folder = tmp_path / number.name
        same = {"output_dir": folder, "learning_rate_schedule_steps": 300}
        assert main(["train", *words(steps=300, **same)]) == 128 + number
        steps = len(read_metrics(folder / "default" / "metrics.jsonl"))
        assert f"stopped after step {steps}: start again to go on" in shown.getvalue()
        assert (folder / "default" / "checkpoints" / str(steps)).is_dir()
    assert capsys.readouterr().err == ""
    assert main(["train", *words(steps=1000, max_minutes=1e-4, **same)]) == 0


@pytest.fixture
def handlers():
    """The handlers of a terminal's foreground, also where the tests run in the background."""
    given = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in given.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_second_interrupt_does_not_wait_for_the_step(handlers):
    with StopRequests() as stop:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # nothing is done
        assert not stop(1)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop(2) and stop.cause() == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


def test_signals_that_are_ignored_stay_so(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    with StopRequests() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop(1)


def test_of_several_processes_each_passes_an_interrupt_on_to_jax_and_knows_the_cause(
    handlers, monkeypatch
):
    passed = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, frame: passed.append(number))  # JAX's
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr("jaxpipe.train.runtime._stop.any_process", bool)
    monkeypatch.setattr("jaxpipe.train.runtime._stop.max_over_processes", lambda number: number)
    try:
        with StopRequests() as stop:
            assert not stop(1)
            os.kill(os.getpid(), signal.SIGINT)
            assert passed == [signal.SIGTERM] and stop.cause() == signal.SIGINT
        with StopRequests() as stop:
            assert stop.cause() == signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_run_ends_when_its_time_is_over(tmp_path):
    history, said = run(tmp_path, steps=100000, max_minutes=1e-4)
    assert "stopped after step" in said
    assert (tmp_path / "default" / "checkpoints" / str(len(history))).is_dir()


BAD = {"adam_eps": 1e-30, "learning_rate": 1e25, "warmup_steps_fraction": 0.0, "steps": 6}
"""The first update throws every weight far away, so the second step is not finite."""


def test_a_step_that_is_not_finite_stops_the_run_and_is_in_no_checkpoint(tmp_path, capsys):
    with pytest.raises(RunError, match=r"Step 2 is bad: its .* or with `bad_step_policy=skip`"):
        run(tmp_path, checkpoint_period=1, **BAD)
    assert not (tmp_path / "default" / "checkpoints" / "2").exists()
    assert main(["train", *words(**BAD, output_dir=tmp_path / "cli")]) == 1
    assert "jaxpipe: error: Step 2 is bad: " in capsys.readouterr().err


def test_bad_steps_may_be_ignored(tmp_path):
    history, _ = run(tmp_path, bad_step_policy="ignore", **BAD)
    assert not math.isfinite(history[-1]["loss"])


def test_a_step_above_the_limit_is_skipped_and_said(tmp_path):
    first, _ = run(tmp_path / "a", bad_step_policy="skip")
    norms = [metrics["gradient_norm"] for metrics in first]
    limit = sorted(norms)[-1] * (1 - 1e-6)  # leaves out the largest
    history, said = run(tmp_path / "b", bad_step_policy="skip", max_gradient_norm=limit)
    skipped = 1 + norms.index(max(norms))
    assert f"step {skipped} has changed nothing: its gradient_norm is " in said
    assert [metrics["skipped"] for metrics in history[:skipped]] == [0.0] * (skipped - 1) + [1.0]
    assert losses(history)[:skipped] == losses(first)[:skipped]
    # A step that is skipped does not move the schedule.
    rates, as_if_none = ([metrics["learning_rate"] for metrics in x] for x in (history, first))
    assert rates[skipped:] == as_if_none[skipped - 1 : -1]
    assert rates[:skipped] == as_if_none[:skipped]


@pytest.mark.parametrize(
    ("devices", "settings"),
    [
        (1, NONE),
        (2, {"ici_pipeline_parallelism": 2}),
        pytest.param(
            2,
            {"pipeline_engine": "scheduled", "ici_pipeline_parallelism": 2},
            marks=pytest.mark.slow,
        ),
        (2, {"pipeline_engine": "mpmd", "ici_pipeline_parallelism": 2}),
        (
            8,
            {"shard_mode": "explicit", "ici_pipeline_parallelism": 2, "ici_data_parallelism": 2}
            | {"ici_fsdp_parallelism": 2, "shard_optimizer_over_data": True}
            | {"num_pipeline_microbatches": 2},
        ),
    ],
)
def test_every_engine_skips(devices, settings):
    setup = setup_of(devices, settings, {"bad_step_policy": "skip", "max_gradient_norm": 1e-9})
    state = init_state(setup.step)
    before = jax.tree.map(np.asarray, state)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (ROWS, 16)).astype(np.int32)
    batch = dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), tokens)
    batch |= {"positions": np.zeros_like(tokens), "segment_ids": np.ones_like(tokens)}
    batch |= {"target_weights": np.ones((ROWS, 16), np.float32)}
    with jax.set_mesh(setup.mesh):
        step = make_train_step(setup.step)
        state, metrics = step(state, shard_batch(setup.batch, batch))
        state, second = step(state, shard_batch(setup.batch, batch))
    assert float(metrics["gradient_norm"]) > 1e-9
    assert float(second["learning_rate"]) == float(metrics["learning_rate"])
    assert int(state.pop("step")) == 2
    before.pop("step")
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state), before)


def test_checks_name_what_is_bad():
    check = partial(check_step, 3, policy="skip", max_gradient_norm=2.0)
    assert check({"loss": 1.0, "gradient_norm": 2.0, "skipped": 0.0}) is None
    assert "its gradient_norm is 2.5, above 2" in str(
        check({"loss": 1.0, "gradient_norm": 2.5, "skipped": 1.0})
    )
    assert "its loss is nan and its gradient_norm is inf" in str(
        check({"loss": math.nan, "gradient_norm": math.inf, "skipped": 1.0})
    )


def test_a_bad_step_is_said_of_what_is_known():
    assert bad_step_reason({"loss": 1.0, "gradient_norm": 9.0}, 0.0) == ""
    assert bad_step_reason({"loss": -math.inf}, 2.0) == "its loss is -inf"
    norm = {"loss": 1.0, "gradient_norm": 2.0001}
    assert bad_step_reason(norm, 2.0) == "its gradient_norm is 2.0001, above 2"


def test_a_profile_of_some_steps_is_written(tmp_path):
    run(tmp_path, steps=4, profile_steps="2:3")
    assert list((tmp_path / "default" / "profile").rglob("*.xplane.pb"))


@pytest.mark.parametrize("text", ["3", "0:2", "5:4", "1-2", "1:2:3"])
def test_windows_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match=r"`profile_steps` is .* Give the first and the last step"):
        parse_profile_steps(text)


def test_compiled_programs_are_kept_for_the_next_start(tmp_path):
    before = jax.config.values["jax_compilation_cache_dir"]
    try:
        run(tmp_path, steps=1, jax_cache_dir=str(tmp_path / "cache"))
        assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "cache")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
