"""Writes the notebooks of docs/notebooks, with their outputs, from Python files of `# %%` cells.

Run it from the root of the repository: `python docs/_notebooks.py`. The cells run in this process,
on emulated devices, so a notebook needs no kernel to be written. A test runs them again and
compares.
"""

import ast
import contextlib
import importlib.util
import io
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "docs" / "notebooks").glob("*.py"))


def _to_notebook() -> ModuleType:
    """Returns examples/to_notebook.py, which splits a file into cells."""
    file = ROOT / "examples" / "to_notebook.py"
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def executed(source: str) -> dict[str, Any]:
    """Returns the notebook of a file, in nbformat 4.4, after running its cells in order."""
    notebook, names = _to_notebook().notebook(source), {"__name__": "__main__"}
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell["execution_count"] = count
            cell["outputs"] = _run("".join(cell["source"]), names, count)
    return notebook


def to_json(notebook: dict[str, Any]) -> str:
    """Returns the text of a notebook's file."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def to_markdown(notebook: dict[str, Any]) -> str:
    """Returns a notebook as a page of the site: code, what it prints, and its pictures."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", [])})
            if "image/svg+xml" in data:
                parts.append(figure("".join(data["image/svg+xml"])))
            else:
                parts.append("```text\n" + "".join(data["text/plain"]).rstrip() + "\n```")
    return "\n\n".join(parts) + "\n"


def figure(svg: str) -> str:
    """Returns a picture as HTML inside Markdown, so that it takes the colours of its page."""
    return f'<div class="picture">{"".join(svg.splitlines())}</div>'


def _run(code: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Runs one cell. Returns what it prints, and the value of its last line if that is one."""
    body = ast.parse(code).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    value = None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(text)})
    if value is not None:
        shown = {"execution_count": count, "metadata": {}, "output_type": "execute_result"}
        outputs.append({"data": _shown(value), **shown})
    return outputs


def _shown(value: Any) -> dict[str, list[str]]:
    """Returns a value in the formats that a notebook asks for."""
    data = {"text/plain": _lines(repr(value))}
    picture = getattr(value, "_repr_svg_", lambda: None)()
    return data | ({"image/svg+xml": _lines(picture)} if picture else {})


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for source in SOURCES:
        source.with_suffix(".ipynb").write_text(to_json(executed(source.read_text("utf-8"))))
