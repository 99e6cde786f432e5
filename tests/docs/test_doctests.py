"""The examples in the package's docstrings print what they show."""

import ast
import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITH_EXAMPLES = [f for f in sorted((ROOT / "jaxpipe").rglob("*.py")) if ">>>" in f.read_text()]


def examples(file: Path) -> Iterator[tuple[str, str, int]]:
    """Yields name, docstring and line of a module, its functions, its classes and their methods.

    They are read from the source: `doctest` passes over functions in a decorator's wrapper, among
    them all that beartype checks.
    """
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text and ">>>" in text:
                yield getattr(node, "name", file.stem), text, node.body[0].lineno - 1


@pytest.mark.parametrize("file", WITH_EXAMPLES, ids=lambda f: str(f.relative_to(ROOT)))
def test_examples_print_what_they_show_in(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    module = importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for name, text, line in examples(file):
        test = doctest.DocTestParser().get_doctest(
            text, dict(vars(module)), f"{module.__name__}.{name}", str(file), line
        )
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
    assert runner.tries > 0, "no docstring has the `>>>` of this file"


def test_sixty_exported_names_have_an_example():
    packages = [init.parent.name for init in (ROOT / "jaxpipe").glob("*/__init__.py")]
    modules = [importlib.import_module(f"jaxpipe.{package}") for package in packages]
    exported = [getattr(m, name) for m in modules for name in dir(m) if not name.startswith("_")]
    named = {id(x): x for x in exported}
    with_example = [x for x in named.values() if callable(x) and ">>>" in (x.__doc__ or "")]
    assert len(with_example) >= 60
