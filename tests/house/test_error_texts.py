"""Sentences of errors: what another library says ends in its own full stop, or in none."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from house.test_house import PACKAGE, files

from jaxpipe.hugging_face.folders import atomic_folder


def joined(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """The values in f-strings that text follows, and that text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            for value, text in zip(node.values, node.values[1:], strict=False):
                if isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant):
                    yield value.value, str(text.value)


def ends_a_sentence(value: ast.expr, errors: set[str], constants: dict[str, str]) -> bool:
    """Whether a value may have a full stop at its end: an error's message, or a constant."""
    if isinstance(value, ast.Name):
        return value.id in errors or constants.get(value.id, "").endswith(".")
    if isinstance(value, ast.BoolOp):
        return any(ends_a_sentence(part, errors, constants) for part in value.values)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        is_text = value.func.id in ("str", "shorten")
        return is_text and ends_a_sentence(value.args[0], errors, constants)
    return False


@pytest.mark.parametrize("file", files(), ids=lambda f: str(f.relative_to(PACKAGE)))
def test_no_error_puts_a_full_stop_behind_a_sentence(file: Path):
    tree = ast.parse(file.read_text())
    nodes = list(ast.walk(tree))
    errors = {n.name for n in nodes if isinstance(n, ast.ExceptHandler) and n.name}
    constants = {
        target.id: node.value.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }
    doubled = [
        f"line {value.lineno}: {ast.unparse(value)}{text[:20]!r}"
        for value, text in joined(tree)
        if text.startswith((".", ":", ",", ";")) and ends_a_sentence(value, errors, constants)
    ]
    assert not doubled, f"write `clause(error)` in {doubled}"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("RESOURCE_EXHAUSTED: No space left on device.\n", "No space left on device"),
        ("No room.\n  Left.", "No room. Left"),
        ("No room", "No room"),
        ("What?", "What?"),
        ("x" * 1000, f"... (500 characters left out) ... {'x' * 250}"),
    ],
    ids=["a full stop", "two lines", "no full stop", "a question", "long"],
)
def test_an_error_of_another_library_is_one_line_of_a_sentence_of_ours(
    tmp_path: Path, message: str, said: str
):
    def write() -> None:
        with atomic_folder(tmp_path / "out"):
            raise ValueError(message)

    with pytest.raises(RuntimeError) as error:
        write()
    assert f"{said}. Nothing is left of it. " in str(error.value)
    assert "\n" not in str(error.value)
