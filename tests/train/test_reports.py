"""What a run says of its speed, as a share of the peak; and the same bits twice."""

import io
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
    unknown, work = (step_work(setup.state.weights, setup.batch, x) for x in (0.0, 2.0))
    assert "mfu" not in speed_metrics(unknown, 1.0)
    known = speed_metrics(work, 1.0)
    assert known["mfu"] == known["tflops_per_second_per_device"] / 2.0


def test_two_deterministic_runs_are_equal_bit_for_bit(tmp_path):
    settings = {"deterministic": True, "enable_checkpointing": False}
    first, second = (run(tmp_path / name, **settings) for name in "ab")
    for name in ("loss", "gradient_norm"):
        assert [m[name] for m in first] == [m[name] for m in second]
