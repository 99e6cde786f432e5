"""The page about long sequences runs from top to bottom; its asserts compare with one device."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "long-sequences.md"


def test_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
