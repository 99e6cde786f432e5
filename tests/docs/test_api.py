"""docs/api.md has the exported names with their first sentences, and nothing else."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "api.md"

spec = importlib.util.spec_from_file_location("api", ROOT / "docs" / "_api.py")
assert spec is not None and spec.loader is not None
api = importlib.util.module_from_spec(spec)
spec.loader.exec_module(api)


@pytest.mark.parametrize("package", api.packages())
def test_the_page_says_what_the_docstrings_say_about(package):
    written = api.sections(PAGE.read_text()).get(package)
    assert written == api.section(package), f"run: make api; git add {PAGE.relative_to(ROOT)}"


def test_the_page_has_no_package_that_is_none():
    assert set(api.sections(PAGE.read_text())) == set(api.packages())


def test_a_first_sentence_ends_where_a_sentence_ends():
    def of(text):
        return api._first_sentence(text)

    assert of("Returns x, e.g. 0.5 or `a.b`.") == "Returns x, e.g. 0.5 or `a.b`."
    assert of("Returns x.\nIt is y.") == "Returns x."
    assert of("Returns what\n    goes on. `x` is y.\n\nMore.") == "Returns what goes on."
    assert of("See Huang et al. Then rest.") == "See Huang et al. Then rest."
