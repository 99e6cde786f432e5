from pathlib import Path

import pytest

from jaxpipe.train.logs import loss_curve


def test_a_loss_curve_is_a_png_however_many_runs_it_shows(tmp_path: Path):
    steps = range(1, 50)
    runs = {f"run {i}": (steps, [4 / step + i for step in steps]) for i in range(9)}
    loss_curve(tmp_path / "loss.png", runs)
    data = (tmp_path / "loss.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000


def test_curves_without_points_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="`curves` is empty"):
        loss_curve(tmp_path / "loss.png", {})
    with pytest.raises(ValueError, match=r"`curves\['a'\]` has 2 steps and 1 losses"):
        loss_curve(tmp_path / "loss.png", {"a": ([1, 2], [0.5])})
