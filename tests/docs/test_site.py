"""The navigation of the site has every page; `make docs` builds it and finds dead links."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def pages(nav: Any) -> Iterator[str]:
    """Yields the pages of a navigation, in order."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from pages(part)


def test_the_navigation_has_every_page_once():
    written = [str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md") if p.parent != DOCS / "dev"]
    notebooks = [f"notebooks/{p.stem}.md" for p in (DOCS / "notebooks").glob("*.ipynb")]
    from_root = ["index.md", "changelog.md", "contributing/index.md"]
    assert sorted(pages(SITE["nav"])) == sorted(written + notebooks + from_root)


def test_every_interactive_schedule_is_drawn_and_shown():
    drawn = re.findall(r'^    "(\w+)": \("', (DOCS / "_site.py").read_text(), re.MULTILINE)
    page = (DOCS / "explanation" / "interactive.md").read_text()
    assert re.findall(r'src="\.\./interactive/(\w+)\.html"', page) == drawn
    assert len(drawn) >= 5
