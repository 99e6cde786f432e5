"""The pictures in docs/pictures are what docs/_pictures.py draws, and nothing in them overlaps."""

import importlib
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest

DOCS = Path(__file__).parents[2] / "docs"
NAMES = sorted(file.stem for file in (DOCS / "pictures").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def pictures() -> Iterator[Any]:
    sys.path.insert(0, str(DOCS))
    yield importlib.import_module("_pictures")
    sys.path.remove(str(DOCS))


class Area(NamedTuple):
    """A rectangle in the coordinates of the picture."""

    left: float
    top: float
    right: float
    bottom: float


def area(part: ET.Element) -> Area:
    """Returns the room that a rectangle or a text takes; a text's width is estimated."""
    x, y = float(part.get("x", 0)), float(part.get("y", 0))
    kind = part.get("class", "").split()
    if part.tag == f"{SVG}rect":
        return Area(x, y, x + float(part.get("width", 0)), y + float(part.get("height", 0)))
    size = 17 if "title" in kind else 11 if "small" in kind else 13
    width = len(part.text or "") * size * (0.61 if "mono" in kind else 0.56)
    left = x - {"start": 0, "middle": width / 2, "end": width}[part.get("text-anchor", "start")]
    return Area(left, y - 0.75 * size, left + width, y + 0.2 * size)


def overlap(a: Area, b: Area) -> bool:
    return a.left < b.right and b.left < a.right and a.top < b.bottom and b.top < a.bottom


def test_there_is_a_file_for_every_picture(pictures):
    assert sorted(pictures.PICTURES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_script_draws(name, pictures):
    written = (DOCS / "pictures" / f"{name}.svg").read_text()
    assert pictures.PICTURES[name]() == written, "run: .venv/bin/python docs/_pictures.py"


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_inside_and_overlap_no_other_text_in(name):
    root = ET.parse(DOCS / "pictures" / f"{name}.svg").getroot()
    _, _, width, height = map(float, root.get("viewBox", "").split())
    texts = [part for part in root if part.tag == f"{SVG}text"]
    for part in [*texts, *root.findall(f"{SVG}rect")]:
        found = area(part)
        assert found.left >= 0 and found.top >= 0, part.text
        assert found.right <= width and found.bottom <= height, part.text
    for a, b in combinations(texts, 2):
        assert not overlap(area(a), area(b)), (a.text, b.text)


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_small_needs_no_other_file_and_has_colours_for_dark_pages(name):
    text = (DOCS / "pictures" / f"{name}.svg").read_text()
    assert len(text.encode()) <= 60_000
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "prefers-color-scheme:dark" in text
