"""Writes a Python file of `# %%` cells as a notebook, without outputs.

python examples/to_notebook.py examples/mpmd_tutorial.py
"""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple


class Cell(NamedTuple):
    """Code, or text in Markdown."""

    is_code: bool
    text: str


def cells(source: str) -> list[Cell]:
    """The docstring of a file as text, and what stands behind each `# %%`."""
    first, *rest = re.split(r"^# %%(.*)\n", source, flags=re.MULTILINE)
    found = [Cell(False, ast.get_docstring(ast.parse(first)) or "")]
    for kind, body in zip(rest[::2], rest[1::2], strict=True):
        text = body.strip("\n")
        if kind.strip() == "[markdown]":
            found.append(Cell(False, re.sub(r"^# ?", "", text, flags=re.MULTILINE)))
        else:
            found.append(Cell(True, text))
    return found


def notebook(source: str) -> dict[str, Any]:
    """In nbformat 4.4."""
    return {
        "cells": [_of_code(text) if is_code else _of_text(text) for is_code, text in cells(source)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 4,
    }


def _of_text(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text.splitlines(keepends=True)}


def _of_code(text: str) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [],
        "source": text.splitlines(keepends=True),
    }


def to_json(source: str) -> str:
    """As it is written to a file."""
    return json.dumps(notebook(source), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        file = Path(name)
        file.with_suffix(".ipynb").write_text(to_json(file.read_text("utf-8")), "utf-8")
