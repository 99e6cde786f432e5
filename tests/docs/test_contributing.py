"""The steps of the pages for contributors run, and end with the numbers of the reference."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxpipe.schedules import FAMILIES

PAGES = sorted((Path(__file__).parents[2] / "docs" / "contributing").glob("*.md"))


@pytest.fixture
def families() -> Iterator[None]:
    """Removes the schedules that a page adds."""
    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_the_steps_run_of(page: Path, families: None):
    text = page.read_text()
    blocks = list(re.finditer(r"```python\n(.*?)```", text, re.DOTALL))
    assert len(blocks) >= 2
    names: dict = {"__name__": page.stem}
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_files_exist_that_are_named_by(page: Path):
    root = PAGES[0].parents[2]
    files = re.findall(r"`([\w/]+/[\w/]*(?:\.py)?)`", page.read_text())
    assert files
    for name in files:
        assert any((root / base / name).exists() for base in ("", "jaxpipe")), name
