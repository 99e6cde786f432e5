import json
import math
from pathlib import Path

import pytest

from jaxpipe.train import RunError, read_metrics
from jaxpipe.train.logs import metrics_writer


def run(folder: Path, steps: range, *, loss: float = 1.0, tensorboard: bool = False) -> None:
    with metrics_writer(folder, first_step=steps.start, tensorboard=tensorboard) as write:
        for step in steps:
            write(step, {"loss": loss * step})


def read(folder: Path) -> list[tuple[int, float]]:
    return [(entry["step"], entry["loss"]) for entry in read_metrics(folder / "metrics.jsonl")]


def test_every_step_is_one_json_object(tmp_path: Path):
    run(tmp_path / "new" / "run", range(1, 4))
    lines = (tmp_path / "new" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": step, "loss": float(step)} for step in (1, 2, 3)
    ]


def test_a_line_is_on_disk_when_write_returns(tmp_path: Path):
    with metrics_writer(tmp_path, first_step=1, tensorboard=False) as write:
        write(1, {"loss": 2.0})
        assert read(tmp_path) == [(1, 2.0)]


def test_a_file_that_is_removed_under_a_run_ends_it(tmp_path: Path):
    with metrics_writer(tmp_path, first_step=1, tensorboard=False) as write:
        write(1, {"loss": 2.0})
        (tmp_path / "metrics.jsonl").unlink()
        with pytest.raises(RunError, match=r"metrics.jsonl has been removed while the run was"):
            write(2, {"loss": 1.0})


def test_resuming_replaces_what_the_killed_run_wrote_beyond_its_checkpoint(tmp_path: Path):
    run(tmp_path, range(1, 6))
    run(tmp_path, range(4, 7), loss=10.0)
    assert read(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0), (6, 60.0)]
    run(tmp_path, range(1, 2))
    assert read(tmp_path) == [(1, 1.0)]


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 3, "loss": 3.0}', "{"])
def test_a_torn_last_line_is_no_line(tmp_path: Path, torn: str):
    run(tmp_path, range(1, 3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    assert read(tmp_path) == [(1, 1.0), (2, 2.0)]
    run(tmp_path, range(3, 4))
    assert read(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_another_broken_line_is_named(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{oh\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl line 2 is not JSON: .* Remove the line"):
        run(tmp_path, range(4, 5))
    (tmp_path / "metrics.jsonl").write_text("[1]\n")
    with pytest.raises(ValueError, match=r"line 1 is '\[1\]', not an object with a `step`"):
        read(tmp_path)


def test_a_loss_that_is_not_a_number_is_kept(tmp_path: Path):
    with metrics_writer(tmp_path, first_step=1, tensorboard=False) as write:
        write(1, {"loss": math.nan})
    assert math.isnan(read(tmp_path)[0][1])


def test_tensorboard_gets_the_same_values_and_hides_the_replaced_ones(tmp_path: Path):
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    run(tmp_path, range(1, 3), tensorboard=True)
    run(tmp_path, range(2, 4), tensorboard=True, loss=10.0)
    events = [e for file in sorted(tmp_path.glob("events.*")) for e in _events(file, Event)]
    values = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert values == [(1, "loss", 1.0), (2, "loss", 2.0), (2, "loss", 20.0), (3, "loss", 30.0)]
    purged = [e.step for e in events if e.HasField("session_log")]
    assert 2 in purged


def _events(file: Path, event_class) -> list:
    """A record is its length (8 bytes), a checksum (4), the event, a checksum (4)."""
    data, events = file.read_bytes(), []
    while data:
        length = int.from_bytes(data[:8], "little")
        events.append(event_class.FromString(data[12 : 12 + length]))
        data = data[12 + length + 4 :]
    return events
