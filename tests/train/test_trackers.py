"""What trackers are told: a user's own, and those of libraries, read by their own readers."""

import io
import json
import math
import struct
import sys
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxpipe.train import Config, RunError, load_config, read_metrics, train
from jaxpipe.train.logs import WriteMetrics, load_trackers, tracking
from jaxpipe.train.loop import archive_history

from .runs import NONE, TINY

MINE = """
from contextlib import contextmanager

@contextmanager
def tracker(folder, *, project, name, settings):
    with open(folder / "mine.txt", "a") as file:
        def write(step, metrics):
            assert step < settings["steps"], "too many"
            print(step, metrics["loss"], file=file)

        print(project, name, settings["steps"], file=file)
        yield write
"""


def test_a_tracker_of_ones_own_is_told_every_step_and_named_when_it_fails(tmp_path, monkeypatch):
    (tmp_path / "my_tracker.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = TINY | NONE | {"output_dir": str(tmp_path), "trackers": "my_tracker:tracker"}
    settings |= {"per_device_batch_size": 1.0, "num_pipeline_microbatches": 1}
    config = Config.model_validate(settings | {"tracker_project": "small"})
    message = "'my_tracker:tracker' did not take the metrics of step 3: AssertionError: too many"
    with pytest.raises(RunError, match=message):
        train(config, stream=io.StringIO())
    first, *told = (tmp_path / "default" / "mine.txt").read_text().splitlines()
    assert first == "small default 3"
    losses = [(x["step"], x["loss"]) for x in read_metrics(tmp_path / "default" / "metrics.jsonl")]
    assert told == [f"{step} {loss}" for step, loss in losses[:2]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wandbb", "`trackers` has 'wandbb'. Give wandb, mlflow, trackio, or `module:function`"),
        ("json:nothing", "`trackers` is 'json:nothing', which cannot be imported: AttributeError"),
        ("json:__name__", "which is str and no function. Give a function that takes `folder`"),
    ],
)
def test_a_tracker_that_is_not_there_is_named_before_anything_runs(name: str, message: str):
    with pytest.raises(ValueError, match=message):
        load_trackers([name])


def test_a_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ValueError, match=r"`trackers` has 'mlflow', .* `pip install mlflow`"):
        load_trackers(["mlflow"])


def test_an_error_at_the_end_is_named_and_hides_no_other(tmp_path: Path):
    @contextmanager
    def broken(folder: Path, **run: Any):
        try:
            yield lambda step, metrics: None
        finally:
            raise OSError("no server")

    def run() -> AbstractContextManager[WriteMetrics]:
        return tracking({"mine": broken}, tmp_path, project="p", name="n", settings={})

    with pytest.raises(RunError, match="'mine' could not be closed: OSError: no server"), run():
        pass
    with pytest.raises(KeyError), run():
        raise KeyError("as if a step failed")
    with (
        pytest.raises(RunError, match="'none' could not be opened: AttributeError"),
        tracking({"none": lambda *_, **__: None}, tmp_path, project="p", name="n", settings={}),  # pyright: ignore[reportArgumentType]
    ):
        pass


def test_the_older_keys_name_a_tracker_and_its_project():
    old = load_config([], ["enable_wandb=true", "wandb_project=small"], presets={"llama-tiny": {}})
    assert (old.tracker_names, old.tracker_project) == (("wandb",), "small")
    with pytest.raises(ValueError, match="`tracker_project` is 'small' and `trackers` is empty"):
        Config(tracker_project="small")


def test_a_run_that_begins_anew_is_another_one_for_trackers(tmp_path: Path):
    (tmp_path / "trackers.json").write_text('{"wandb": "0"}')
    assert archive_history(tmp_path) == ["before-1.trackers.json"]


def told_by_mlflow(folder: Path, run_id: str) -> list[tuple[int, float]]:
    import mlflow  # pyright: ignore[reportMissingImports]

    client = mlflow.MlflowClient()
    assert client.get_run(run_id).info.status == "FAILED"
    assert client.get_run(run_id).data.params == {"steps": "4", "dtype": "float32"}
    return [(x.step, x.value) for x in client.get_metric_history(run_id, "loss")]


def told_by_trackio(folder: Path, run_id: str) -> list[tuple[int, float]]:
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    return [(x["step"], float(x["loss"])) for x in SQLiteStorage.get_logs("small", run_id)]


def told_by_wandb(folder: Path, run_id: str) -> list[tuple[int, float]]:
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]

    told = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        assert run_id in file.name
        data, at = file.read_bytes(), 7
        while at < len(data):  # LevelDB's format of logs: checksum, length and kind of a record
            _, length, kind = struct.unpack("<IHB", data[at : at + 7])
            assert kind == 1, "records are small"
            record = wandb_internal_pb2.Record.FromString(data[at + 7 : at + 7 + length])
            at += 7 + length
            if record.HasField("history"):
                items = {(x.key or x.nested_key[0]): x.value_json for x in record.history.item}
                told.append((record.history.step.num, json.loads(items["loss"])))
    return told


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow's own calls
@pytest.mark.parametrize("library", ["wandb", "mlflow", "trackio"])
def test_a_library_has_every_step_of_a_run_that_was_resumed(tmp_path, monkeypatch, library: str):
    for name, value in {
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "WANDB_MODE": "offline",
        "HF_HUB_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    pytest.importorskip(library)
    run: dict[str, Any] = {"project": "small", "name": "run"}
    run["settings"] = {"steps": 4, "dtype": "float32"}
    losses = [2.5, 1.5, math.nan, 0.5]
    for start in (0, 2):
        with (
            pytest.raises(KeyError),
            tracking(load_trackers([library]), tmp_path, **run) as write,
        ):
            for step in (start, start + 1):
                write(step + 1, {"loss": losses[step], "accuracy": 0.25})
            raise KeyError("as if a step failed")
    run_id = json.loads((tmp_path / "trackers.json").read_text())[library]
    told = globals()[f"told_by_{library}"](tmp_path, run_id)
    assert [step for step, _ in told] == [1, 2, 3, 4]
    assert [str(loss) for _, loss in told] == [str(loss) for loss in losses]
