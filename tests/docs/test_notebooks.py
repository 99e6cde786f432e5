"""The notebooks run, and have the outputs that they show."""

import importlib.util
import json
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("notebooks", ROOT / "docs" / "_notebooks.py")
assert spec is not None and spec.loader is not None
notebooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(notebooks)


@pytest.mark.parametrize(
    "source",
    [  # half a minute: dozens of plans of a large model
        pytest.param(source, marks=pytest.mark.slow if source.stem == "plan-70b" else ())
        for source in notebooks.SOURCES
    ],
    ids=lambda s: s.stem,
)
def test_a_notebook_has_the_outputs_of_its_cells(source: Path):
    written = json.loads(source.with_suffix(".ipynb").read_text("utf-8"))
    with jax.numpy_dtype_promotion("standard"):  # as in a fresh process
        run = notebooks.executed(source.read_text("utf-8"))
    for cell, wanted in zip(written["cells"], run["cells"], strict=True):
        assert cell == wanted, "run: python docs/_notebooks.py"
    assert written == run


def test_every_notebook_has_its_source():
    written = (ROOT / "docs" / "notebooks").glob("*.ipynb")
    assert {file.stem for file in written} == {source.stem for source in notebooks.SOURCES}
