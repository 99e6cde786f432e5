"""What a run tells others: its share of the peak, Weights & Biases; and the same bits twice."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpipe.train import Config, train
from jaxpipe.train.estimate import peak_tflops, speed_metrics, step_work

from .runs import NONE, TINY, setup_of

SETTINGS = TINY | NONE | {"ici_fsdp_parallelism": 8, "per_device_batch_size": 1.0}
SETTINGS |= {"num_pipeline_microbatches": 1, "steps": 3}


def run(folder: Path, **settings: Any) -> list[dict[str, float]]:
    config = Config.model_validate(SETTINGS | {"output_dir": str(folder)} | settings)
    return train(config, stream=io.StringIO())


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [("TPU v5 lite", 197), ("TPU v5p", 459), ("NVIDIA H200", 989), ("cpu", None), ("TPU v9", None)],
)
def test_the_peak_is_that_of_the_device(kind: str, tflops: float | None):
    device = SimpleNamespace(device_kind=kind)
    assert peak_tflops(device, 0.0) == tflops
    assert peak_tflops(device, 12.5) == 12.5


def test_mfu_is_the_share_of_it():
    setup = setup_of(1, NONE)
    unknown, work = (step_work(setup.state.weights.sizes, setup.batch, x) for x in (0.0, 2.0))
    assert "mfu" not in speed_metrics(unknown, 1.0)
    known = speed_metrics(work, 1.0)
    assert known["mfu"] == known["tflops_per_second_per_device"] / 2.0


def test_wandb_is_told_every_step(tmp_path, monkeypatch):
    begun, logged, ended = [], [], []
    of_run = SimpleNamespace(
        log=lambda metrics, step: logged.append((step, metrics)),
        finish=lambda exit_code=0: ended.append(exit_code),
    )

    def init(**options: Any) -> Any:
        begun.append(options)
        return of_run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    more = {"enable_wandb": True, "wandb_project": "small", "learning_rate_schedule_steps": 4}
    history = run(tmp_path, **more)
    assert logged == list(zip((1, 2, 3), history, strict=True))
    run(tmp_path, **more, steps=4)
    assert [step for step, _ in logged] == [1, 2, 3, 4]
    assert ended == [0, 0]
    assert {options["project"] for options in begun} == {"small"}
    assert len({options["id"] for options in begun}) == 1  # it goes on in the same run
    assert begun[0]["resume"] == "allow"


def test_without_wandb_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"`enable_wandb` is true, and wandb cannot be imported"):
        run(tmp_path, enable_wandb=True)
    assert not (tmp_path / "default").exists()


def test_a_project_that_nothing_reads_is_refused():
    with pytest.raises(ValueError, match="`wandb_project` is 'small' and `enable_wandb` false"):
        Config(wandb_project="small")


def test_two_deterministic_runs_are_equal_bit_for_bit(tmp_path):
    settings = {"deterministic": True, "enable_checkpointing": False}
    first, second = (run(tmp_path / name, **settings) for name in "ab")
    for name in ("loss", "gradient_norm"):
        assert [m[name] for m in first] == [m[name] for m in second]
