"""The house of docs/architecture.md: who may import whom, and how large a room may be."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jaxpipe"

# A folder may import those named here, and nothing else of jaxpipe.
MAY_IMPORT: dict[str, set[str]] = {
    "devices": set(),
    "schedules": set(),
    "sharding": set(),
    "data": set(),
    "ir": set(),
    "autodiff": {"ir"},
    "spmd": {"autodiff", "ir", "schedules", "sharding"},
    "mpmd": {"autodiff", "ir", "schedules", "sharding", "xla"},
    "engines": {"spmd", "mpmd", "autodiff", "schedules", "sharding"},
    "api": {"devices", "engines", "autodiff", "ir", "schedules", "sharding", "xla"},
    "testing": {"api", "engines", "schedules"},
    "modules": {"spmd", "autodiff", "sharding"},
    "linen": {"api", "modules", "spmd"},
    "nnx": {"api", "modules"},
    "equinox": {"api"},
    "models": {"autodiff", "sharding"},
    "xla": {"devices"},
    "cost": {"devices", "schedules"},
    "train": {
        "data",
        "devices",
        "engines",
        "linen",
        "nnx",
        "modules",
        "models",
        "xla",
        "spmd",
        "mpmd",
        "autodiff",
        "schedules",
        "sharding",
    },
    "planner": {
        "api",
        "autodiff",
        "cost",
        "devices",
        "engines",
        "models",
        "schedules",
        "sharding",
        "train",
        "xla",
    },
    "hugging_face": {"train", "models"},
    "report": {"train", "xla", "models", "schedules", "sharding"},
    "cli": {
        "report",
        "planner",
        "hugging_face",
        "train",
        "data",
        "xla",
        "models",
        "mpmd",
        "schedules",
    },
}

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 100
# An exception is a row here, with its reason.
LARGER_FILES: dict[str, str] = {}
LARGER_FUNCTIONS = {
    "api/_pipeline.py:pipeline": "the one entry of all features: 110 lines say what arguments mean"
}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def folder(file: Path) -> str | None:
    parts = file.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


def module_name(file: Path) -> str:
    return ".".join(("jaxpipe", *file.relative_to(PACKAGE).with_suffix("").parts))


def imported(file: Path) -> Iterator[str]:
    """Absolute names of the modules a file imports, also inside functions."""
    package = ("jaxpipe", *file.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *((node.module,) if node.module else ())))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def arrows(file: Path) -> set[str]:
    """The other packages of jaxpipe that a file imports."""
    named = {module.split(".")[1] for module in imported(file) if module.startswith("jaxpipe.")}
    return named & set(MAY_IMPORT) - {folder(file)}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_follow_the_arrows_and_no_arrow_is_without_an_import(package: str):
    used = {there for file in files() if folder(file) == package for there in arrows(file)}
    assert used == MAY_IMPORT[package]


def test_no_modules_import_each_other_in_a_circle():
    """Packages count too, except those on the path of a module, which run before it anyway."""
    paths = {module_name(file).removesuffix(".__init__"): file for file in files()}
    graph = {
        name: {
            there
            for there in imported(file)
            if there in paths and not f"{name}.".startswith(f"{there}.")
        }
        for name, file in paths.items()
    }
    TopologicalSorter(graph).prepare()  # raises a CycleError that names the circle


def test_every_folder_stands_in_the_table():
    folders = {folder(f) for f in files()} - {None}
    assert folders <= set(MAY_IMPORT)


@pytest.mark.parametrize("package", ["devices", "schedules"])
def test_some_packages_import_only_the_standard_library(package: str):
    for file in files():
        if folder(file) != package:
            continue
        for module in imported(file):
            top = module.split(".")[0]
            assert top == "jaxpipe" or top in sys.stdlib_module_names, f"{file.name}: {module}"


def test_files_are_at_most_700_lines():
    sizes = {str(f.relative_to(PACKAGE)): len(f.read_text().splitlines()) for f in files()}
    larger = {name for name, lines in sizes.items() if lines > MAX_FILE_LINES}
    assert larger == set(LARGER_FILES)


def test_functions_are_at_most_100_lines():
    larger = set()
    for file in files():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    larger.add(f"{file.relative_to(PACKAGE)}:{node.name}")
    assert larger == set(LARGER_FUNCTIONS)


def test_a_folder_is_private_files_and_an_init():
    for file in files():
        name = file.name
        assert name in {"__init__.py", "__main__.py"} or name.startswith("_"), file


def test_importing_the_core_needs_jax_numpy_and_jaxtyping_only():
    # A finder that refuses what the extras install.
    program = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"flax", "optax", "orbax", "grain", "pydantic", "yaml", "rich",
                                  "tensorboardX", "tokenizers", "matplotlib", "beartype", "pyarrow",
                                  "sentencepiece", "equinox"}:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Refuse())
import jaxpipe, jaxpipe.schedules, jaxpipe.sharding, jaxpipe.autodiff, jaxpipe.spmd
import jaxpipe.models, jaxpipe.xla, jaxpipe.cli
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
