"""Checkpoints by the clock."""

import io
from typing import Any

import pytest

from jaxpipe.train import Config, train
from jaxpipe.train.checkpoint import CheckpointTimer

from .runs import NONE, TINY


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_checkpoint_is_due_so_long_after_the_last_one():
    clock, due = Clock(), []
    by_time = CheckpointTimer(1.0, clock=clock, alone=True)
    for step in range(1, 13):
        clock.now += 25.0
        if step == 5:
            by_time.saved()  # for another reason
        if by_time.is_due(step):
            due.append(step)
            by_time.saved()
    assert due == [3, 8, 11]


def test_without_minutes_none_is_due():
    clock = Clock()
    by_time = CheckpointTimer(0.0, clock=clock, alone=True)
    clock.now += 1e9
    assert not by_time.is_due(1)


@pytest.mark.parametrize("seconds", [0.5, 7.0, 100.0])
def test_processes_with_different_clocks_agree_and_seldom_ask(seconds: float):
    """The second one's clock stands still, so it knows of no time that passes."""
    clock, said = Clock(), list[int]()

    def say(steps: int) -> int:
        said.append(steps)
        return steps

    first = CheckpointTimer(10.0, clock=clock, agree=say, alone=False)
    second = CheckpointTimer(10.0, clock=Clock(), agree=lambda _: said[-1], alone=False)
    due, now = [], clock.now
    for step in range(1, 3001):
        clock.now += seconds
        decisions = first.is_due(step), second.is_due(step)
        assert decisions[0] == decisions[1]
        if decisions[0]:
            due.append(clock.now - now)
            now = clock.now
            first.saved()
            second.saved()
    # Never early, and late by some steps at most.
    assert all(600 <= time <= 600 + 3 * seconds for time in due)
    assert len(due) == pytest.approx(3000 * seconds / 600, rel=0.4, abs=1)
    assert len(said) <= len(due) * 13 + 15


def test_steps_that_become_slower_are_asked_about_in_time():
    clock, asked = Clock(), []

    def say(steps: int) -> int:
        asked.append(steps)
        return steps

    by_time = CheckpointTimer(10.0, clock=clock, agree=say, alone=False)
    for step in range(1, 1000):
        clock.now += 1.0 if step < 100 else 3.0
        if by_time.is_due(step):
            break
    assert 600 <= clock.now - 100.0 <= 600 * 2


def test_a_run_saves_by_time(tmp_path, monkeypatch):
    clock, start = Clock(), CheckpointTimer.__init__

    def start_on_clock(timer: CheckpointTimer, minutes: float) -> None:
        start(timer, minutes, clock=clock, alone=True)

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            clock.now += 20.0 * text.startswith("step ")
            return super().write(text)

    monkeypatch.setattr(CheckpointTimer, "__init__", start_on_clock)
    settings: dict[str, Any] = {"ici_fsdp_parallelism": 8, "per_device_batch_size": 1.0}
    settings |= {"num_pipeline_microbatches": 1, "steps": 9, "max_to_keep": 9}
    settings |= {"checkpoint_minutes": 1.0, "output_dir": str(tmp_path)}
    train(Config.model_validate(TINY | NONE | settings), stream=Stream())
    folder = tmp_path / "default" / "checkpoints"
    saved = sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
    # A step's line is shown while the next one runs; that of a checkpoint's step before it.
    assert saved == [4, 8, 9]


def test_minutes_without_checkpoints_are_refused():
    with pytest.raises(
        ValueError, match=r"`checkpoint_minutes` is 5\.0 and `enable_checkpointing`"
    ):
        Config(checkpoint_minutes=5.0, enable_checkpointing=False)
