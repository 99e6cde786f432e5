"""Completes the documentation site with pages that are made from other files of the repository.

MkDocs calls the functions `on_...` while it builds (mkdocs.yml). README.md is the first page, every
package has a page of the API reference, and a link to a file that is on no page becomes its name.
"""

import ast
import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
sys.path.insert(0, str(ROOT))  # `jaxpipe.schedules` alone, which needs no other package
import _api  # noqa: E402
import _notebooks  # noqa: E402

from jaxpipe.schedules import Costs, build  # noqa: E402
from jaxpipe.schedules.io import to_html  # noqa: E402

FROM_ROOT = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing/index.md": "CONTRIBUTING.md",
}
"""Pages that are files in the root of the repository."""

INTERACTIVE = {
    "1f1b": ("gpipe", "1f1b"),
    "interleaved": ("1f1b", "interleaved_1f1b"),
    "zero_bubble": ("zero_bubble_h1", "1f1b"),
    "v_shaped": ("zbv", "v_half"),
    "dualpipev": ("dualpipev", "zbv"),
}
"""The interactive pages of docs/explanation/interactive.md, and the schedules on each."""

_LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)#: ]+)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Adds the packages to the navigation."""
    reference = next(item["API reference"] for item in config.nav if "API reference" in item)
    pages = {depth: [] for depth in range(3)}
    for package in _packages():
        pages[package.count(".")].append({package: _page_of(package)})
    reference += [*pages[0], *pages[1], {"Second doors": pages[2]}]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made from other files."""
    for page, source in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for package in _packages():
        files.append(File.generated(config, _page_of(package), content=_reference(package)))
    for source in _notebooks.SOURCES:
        notebook = json.loads(source.with_suffix(".ipynb").read_text("utf-8"))
        text = (
            f"{_notebooks.to_markdown(notebook)}\n[This page as a notebook]({source.stem}.ipynb)\n"
        )
        files.append(File.generated(config, f"notebooks/{source.stem}.md", content=text))
    for name, shown in INTERACTIVE.items():
        schedules = {family: build(family, ranks=4, microbatches=8) for family in shown}
        page = to_html(schedules, Costs())
        files.append(File.generated(config, f"interactive/{name}.html", content=page))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Turns links between files of the repository into links between pages."""
    path = page.file.src_uri
    folder = posixpath.dirname(f"docs/{path}") if path not in FROM_ROOT else ""
    pages = {f"docs/{f.src_uri}": f.src_uri for f in files if not f.inclusion.is_excluded()}
    pages |= {source: page for page, source in FROM_ROOT.items()}
    if not path.startswith("notebooks/"):  # which link to the files themselves
        pages |= {file: f"{page[:-6]}.md" for file, page in pages.items() if page[-6:] == ".ipynb"}

    def link(match: re.Match[str]) -> str:
        mark, text, target, anchor = match.groups()
        found = posixpath.normpath(posixpath.join(folder, target))
        if mark and found.endswith("pipeline.svg"):
            return _notebooks.figure((ROOT / found).read_text())
        if found in pages:
            to = posixpath.relpath(pages[found], posixpath.dirname(path) or ".")
            return f"{mark}[{text}]({to}{anchor or ''})"
        if not (ROOT / found).exists():
            return match[0]  # MkDocs says so
        return f"`{text}`" if text.replace("docs/", "") in found else f"{text} (`{found}`)"

    if path == "api.md":
        markdown = _with_references(markdown)
    if path == "index.md":
        markdown = _with_cards(markdown, "## First steps")
    return _as_sessions(_LINK.sub(link, markdown))


def _with_cards(markdown: str, heading: str) -> str:
    """Shows the list under a heading as cards."""
    before, after = markdown.split(f"{heading}\n\n")
    steps, rest = after.split("\n\n", 1)
    return f'{before}{heading}\n\n<div class="grid cards" markdown>\n\n{steps}\n\n</div>\n\n{rest}'


def _packages() -> list[str]:
    """Returns the packages that have a page; that of `jaxpipe` takes the place of its `api`'s."""
    return [name for name in _api.packages() if name != "jaxpipe.api" and _names(name)]


def _names(package: str) -> list[str]:
    """Returns the names that a package exports; `jaxpipe` imports its own at their first use."""
    if package != "jaxpipe":
        return list(_api.exported(package))
    imports = _api._statements(_api._tree(package).body)
    return [
        alias.name
        for node in imports
        if isinstance(node, ast.ImportFrom) and node.module  # packages have pages of their own
        for alias in node.names
    ]


def _page_of(package: str) -> str:
    return f"reference/{package}.md"


def _reference(package: str) -> str:
    """Returns the page of a package: its docstring and every name that it exports."""
    names = sorted(_names(package), key=lambda name: (name.isupper(), name.lower()))
    head = f"::: {package}\n    options:\n      members: []\n      show_root_heading: false"
    return "\n\n".join([f"# {package}", head, *(f"::: {package}.{n}" for n in names)]) + "\n"


def _as_sessions(markdown: str) -> str:
    """Marks blocks of `>>>` as sessions, and removes the empty line that doctest wants."""
    return re.sub(
        r"^```python\n(>>> .*?)\n+```$",
        r"```pycon\n\1\n```",
        markdown,
        flags=re.DOTALL | re.MULTILINE,
    )


def _with_references(page: str) -> str:
    """Links every name of docs/api.md to its entry in the reference."""
    package, lines = "", []
    for line in page.splitlines():
        if line.startswith("## "):
            package = line.removeprefix("## ")
            package = "jaxpipe" if package == "jaxpipe.api" else package
        lines.append(re.sub(r"^\| `(\w+)` \|", rf"| [`\1`][{package}.\1] |", line))
    return "\n".join(lines)
