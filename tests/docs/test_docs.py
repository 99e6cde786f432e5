"""What the documents say is run: Python of the README, and the sessions in docs/."""

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_code_in_the_readme_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    names: dict = {}
    exec(compile(blocks[0], "README.md", "exec"), names)
    assert names["y"].shape == (8, 32, 16)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_sessions_in_the_docs_print_what_they_show(page):
    assert doctest.testfile(str(page), module_relative=False).failed == 0


def test_links_in_the_documents_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
