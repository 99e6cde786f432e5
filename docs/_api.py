"""Writes docs/api.md: every name that a package exports, with the first sentence about it.

Run it from the root of the repository, as `make api`, or with names of packages to renew their
sections alone: `python docs/_api.py jaxpipe.schedules`. The sources are read, not imported. A
sentence is that of the docstring; a constant has none, so the comment above it counts.
"""

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"

HEAD = """\
# Names

Every name that the packages of jaxpipe export, with its first sentence; `help(NAME)` shows the
rest: arguments, shapes, results and errors. A package inside a package, such as
`jaxpipe.schedules.builders`, is a second door, for those who build on the parts: its names may
change between minor versions. Modules whose path has an underscore are private. `make api` writes
this page, and a test compares it with the packages.
"""


def packages() -> list[str]:
    """Returns `jaxpipe`, the packages in it, and those of their sub-packages that export names."""
    inits = sorted(ROOT.glob("jaxpipe/*/__init__.py"))
    doors = [f"jaxpipe.{init.parent.name}" for init in inits]
    seconds = (
        ".".join(init.parent.relative_to(ROOT).parts)
        for init in ROOT.glob("jaxpipe/*/*/__init__.py")
    )
    return ["jaxpipe", *sorted([*doors, *filter(exported, seconds)])]


def exported(package: str) -> dict[str, tuple[str, str]]:
    """Returns the names that a package exports, each with the module and the name it comes from."""
    names = {}
    for node in _statements(_tree(package).body):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name
                if name != "*" and not name.startswith("_"):
                    names[name] = (_absolute(package, node), alias.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.FunctionDef | ast.ClassDef):
            for name in _bound(node):
                if not name.startswith("_"):
                    names[name] = (package, name)
    return names


def sentence(module: str, name: str) -> str:
    """Returns the first sentence about a definition, in one line.

    Raises:
        LookupError: If the module does not define the name.
    """
    if _file(f"{module}.{name}"):
        return _first_sentence(ast.get_docstring(_tree(f"{module}.{name}")) or "")
    body = list(_statements(_tree(module).body))
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return sentence(_absolute(module, node), alias.name)
        if name not in _bound(node):
            continue
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            return _first_sentence(ast.get_docstring(node) or "")
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            return _first_sentence(str(following.value.value))
        return _first_sentence(_comment_at(module, node))
    raise LookupError(f"{module} does not define `{name}`")


def section(package: str) -> str:
    """Returns the text about one package: its own first sentence, and a row for each name."""
    docstring = ast.get_docstring(_tree(package)) or ""
    rows = [
        f"| `{name}` | {sentence(*source).replace('|', chr(92) + '|')} |"
        for name, source in sorted(exported(package).items())
    ]
    table = ["", "| | |", "|---|---|", *rows] if rows else []
    return "\n".join([f"## {package}", "", _first_sentence(docstring), *table]) + "\n"


def sections(page: str) -> dict[str, str]:
    """Returns the sections of a written page by package."""
    parts = re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]
    return {part.split("\n", 1)[0].removeprefix("## "): part.rstrip("\n") + "\n" for part in parts}


def names(section: str) -> set[str]:
    """Returns the names that have a row in a section."""
    return set(re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE))


def page(renewed: list[str] | None = None) -> str:
    """Returns the whole page.

    Args:
        renewed: Packages whose sections are written anew; the others stay as they are on the page.
            All of them by default.
    """
    old = {} if renewed is None else sections(PAGE.read_text())
    texts = (
        old[p] if renewed is not None and p not in renewed and p in old else section(p)
        for p in packages()
    )
    return "\n".join([HEAD, *texts])


def _file(module: str) -> Path | None:
    path = ROOT / Path(*module.split("."))
    return next((f for f in [path / "__init__.py", path.with_suffix(".py")] if f.exists()), None)


def _tree(module: str) -> ast.Module:
    file = _file(module)
    if file is None:
        raise LookupError(f"{module} is not a module of this repository")
    return ast.parse(file.read_text())


def _absolute(module: str, node: ast.ImportFrom) -> str:
    file = _file(module)
    package = module.split(".") if file and file.name == "__init__.py" else module.split(".")[:-1]
    base = package[: len(package) - node.level + 1] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a module, also those under `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _bound(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return []
    targets: list[ast.expr] = getattr(node, "targets", [getattr(node, "target", None)])
    return [n.id for t in targets if t for n in ast.walk(t) if isinstance(n, ast.Name)]


def _comment_at(module: str, node: ast.stmt) -> str:
    """Returns the comment in the lines directly above a statement, or behind its first line."""
    file = _file(module)
    lines = file.read_text().splitlines() if file else []
    first = node.lineno - 1
    start = first
    while start > 0 and lines[start - 1].startswith("#"):
        start -= 1
    comment = [line.lstrip("# ") for line in lines[start:first]]
    behind = re.search(r"  # (.*)$", lines[first]) if lines else None
    return "\n".join(comment) or (behind[1] if behind else "")


def _first_sentence(text: str) -> str:
    paragraph = textwrap.dedent(text).strip().split("\n\n", 1)[0]
    line = " ".join(paragraph.split())
    end = re.search(r"(?<!e\.g)(?<!i\.e)(?<!et al)(?<!vs)([.:]$|[.](?= [A-Z`]))", line)
    line = line[: end.end()] if end else line
    return line.replace("<", "&lt;") if "`" not in line else line


if __name__ == "__main__":
    PAGE.write_text(page(sys.argv[1:] or None))
