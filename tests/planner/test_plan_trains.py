"""A plan for the devices of this process: it trains, and needs the memory that was predicted."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxpipe.cli import main
from jaxpipe.models import PRESETS
from jaxpipe.train import load_config, read_metrics, train

_TINY = ["model_name=llama-tiny", "dtype=float32", "--devices", "here", "--batch", "64"]
_FIXED = {
    "1F1B": ["ici_pipeline_parallelism=2", "ici_fsdp_parallelism=4", "--schedule", "1f1b"],
    "circular": ["ici_pipeline_parallelism=4", "pipeline_engine=circular"],
    "FSDP": ["ici_fsdp_parallelism=8"],
    "zero bubble": ["ici_pipeline_parallelism=4", "--schedule", "zero_bubble_h1"],
}
_SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in _FIXED if name != "1F1B"]

_TOLERANCE = 0.15
"""At these sizes a tenth of all are arrays that the planner does not know, and what of a layer
XLA:CPU stores at a time differs by engine. The largest error of these rows is 7%."""


@pytest.mark.parametrize("name", ["1F1B", *_SLOW])
def test_a_plan_trains_and_its_program_has_the_predicted_peak(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    file = tmp_path / "plan.yml"
    given = [*_TINY, "--sequence", "64", "remat_policy=full", *_FIXED[name]]
    assert (
        main(["plan", *given, "--top", "1", "--verify", "1", "--json", "--write", str(file)]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    predicted = found["plans"][0]["memory_bytes"]["total"]
    assert predicted == pytest.approx(found["verified"][0]["peak_bytes"], rel=_TOLERANCE)

    pairs = ["steps=3", f"output_dir={tmp_path}", "run_name=run", "enable_checkpointing=false"]
    train(load_config([file], pairs, presets=PRESETS))
    losses = [row["loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert len(losses) == 3 and np.all(np.isfinite(losses))
