"""The names in docs/glossary.md exist, and names that it has replaced are defined nowhere."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "jaxpipe").rglob("*.py"))
ROW = re.compile(r"^\| (.+?) \| (.+?) \| (.*?)\|$", re.MULTILINE)


def words(text: str) -> set[str]:
    return set(text.split())


# Functions and classes of these names were renamed: the words said several things, or nothing.
BANNED = words(
    """
    Access Act Agreement Choice Chunks Code Constant Counts Fission Free Halves Held How Kept Left
    Moves Place Plain Program Row Run Segment Shards Step Value Visit Waiting Work

    at bubble_share content divide either emit ends exchange fission fold frees fresh give
    held_at_most joined kept lending like links merge narrow needs number numbers often outside
    place placed places present put_back results rim runnable_order same set_aside share_head
    shared_loss side spread stages_apart sums tell underway undivide vary vary_as varying
    varying_like waiting whole wide
    """
)
BANNED_MODULES = words(
    """
    _ahead _apart _by_time _calls _choice _footprint _gathering _history _initial _moves _peak
    _predicted _rim _start _together _update _visits
    """
)


def terms() -> list[str]:
    page = (ROOT / "docs" / "glossary.md").read_text()
    return [term for term, _, _ in ROW.findall(page)][1:]


def defined(node: ast.AST) -> Iterator[str]:
    """Yields the name that a node defines, if any."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id


def test_sixty_words_are_explained_each_once():
    assert len(terms()) == len(set(terms())) >= 60


def test_every_term_in_code_exists():
    trees = [ast.parse(file.read_text()) for file in FILES]
    known = {name for tree in trees for node in ast.walk(tree) for name in defined(node)}
    known |= {file.parent.name for file in FILES}
    code = [term.strip("`") for term in terms() if term.startswith("`")]
    assert code
    assert set(code) <= known


def test_no_replaced_name_is_defined():
    found = {
        f"{file.relative_to(ROOT / 'jaxpipe')}:{node.name}"
        for file in FILES
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name.strip("_") in BANNED
    }
    assert found == set()
    assert not {file.stem for file in FILES} & BANNED_MODULES
