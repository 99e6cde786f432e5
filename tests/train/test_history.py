import json
from pathlib import Path

import pytest

from jaxpipe.train.loop import read_starts, record_start

from .runs import NONE, setup_of


def test_a_start_says_on_what_it_was_and_which_steps_come_again(tmp_path: Path):
    assert read_starts(tmp_path) == []
    setup = setup_of(2, {"ici_pipeline_parallelism": 2})
    record_start(tmp_path, setup.mesh, 0)
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 8)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    record_start(tmp_path, setup.mesh, 4)
    first, second = read_starts(tmp_path)
    assert (first["first_step"], first["repeated_steps"]) == (1, 0)
    assert (second["first_step"], second["repeated_steps"]) == (5, 3)
    assert (first["num_devices"], first["num_processes"]) == (2, 1)
    assert first["device_kind"] == "cpu"


def test_a_torn_start_is_replaced_by_the_next_and_a_broken_one_named(tmp_path: Path):
    file = tmp_path / "starts.jsonl"
    file.write_text('{"first_step": 1}\n{"first_s')
    assert read_starts(tmp_path) == [{"first_step": 1}]
    record_start(tmp_path, setup_of(1, NONE).mesh, 6)
    assert [start["first_step"] for start in read_starts(tmp_path)] == [1, 7]
    assert [path.name for path in tmp_path.iterdir()] == ["starts.jsonl"]
    file.write_text('{"first_step": "<b>"}\n')
    with pytest.raises(ValueError, match=r"starts\.jsonl line 1 is .*, not an object with a `firs"):
        read_starts(tmp_path)
