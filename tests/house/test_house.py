"""The house of docs/architecture.md: who may import whom, and how large a room may be."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jaxpipe"

# A folder, or a module in none, may import those named here, and nothing else of jaxpipe.
MAY_IMPORT: dict[str, set[str]] = {
    # Lazily, at the first use of a name.
    "__init__": {
        "_lazy",
        "api",
        "testing",
        "kernels",
        "cli",
        "equinox",
        "linen",
        "mpmd",
        "nnx",
        "schedules",
        "sharding",
        "train",
    },
    "__main__": {"cli"},
    # Of `sharding` only `specs`, which imports JAX alone: a constraint that JAX is given in place
    # of another is divided into its explicit and its automatic axes.
    "_compat": {"sharding"},
    "_lazy": set(),
    "_durable": set(),
    "_exit": set(),
    "_input": set(),
    "devices": set(),
    "schedules": {"_input", "_lazy"},
    "sharding": {"_input"},
    "data": {"_durable", "_input", "_lazy"},
    "ir": {"_compat", "_lazy"},
    "autodiff": {"_compat", "_lazy", "ir"},
    "spmd": {"_compat", "_lazy", "autodiff", "devices", "ir", "schedules", "sharding"},
    # Of `compat` only JaxPP's names, lazily: they are found in `jaxpipe.mpmd` too.
    "mpmd": {
        "_compat",
        "_exit",
        "_input",
        "_lazy",
        "autodiff",
        "compat",
        "devices",
        "ir",
        "schedules",
        "sharding",
        "xla",
    },
    "engines": {"spmd", "mpmd", "autodiff", "ir", "schedules", "sharding", "xla", "devices"},
    "api": {
        "_compat",
        "_input",
        "kernels",
        "devices",
        "engines",
        "autodiff",
        "ir",
        "schedules",
        "sharding",
        "_lazy",
        "xla",
    },
    "testing": {"api", "engines", "schedules"},
    "compat": {"_compat", "_input", "autodiff", "mpmd", "schedules", "sharding", "spmd"},
    "linen": {"api", "compat"},
    "nnx": {"api", "compat"},
    "equinox": {"api"},
    "kernels": {"_compat", "_lazy", "sharding"},
    "models": {"_compat", "kernels", "autodiff", "sharding"},
    "xla": {"_input", "_lazy", "devices"},
    "cost": {"devices", "schedules"},
    "train": {
        "_compat",
        "_durable",
        "_exit",
        "_input",
        "_lazy",
        "api",
        "kernels",
        "cost",
        "data",
        "devices",
        "engines",
        "models",
        "planner",
        "xla",
        "spmd",
        "mpmd",
        "autodiff",
        "schedules",
        "sharding",
    },
    "planner": {
        "kernels",
        "_compat",
        "api",
        "autodiff",
        "cost",
        "devices",
        "engines",
        "ir",
        "models",
        "schedules",
        "sharding",
        "xla",
    },
    "hugging_face": {"_durable", "_input", "train", "models"},
    "report": {"_input", "engines", "train", "xla", "models", "schedules", "sharding"},
    "cli": {
        "_durable",
        "_exit",
        "_input",
        "devices",
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


MAX_CLOSURE_LINES = 24_000
"""Lines of the modules that `jaxpipe.pipeline` imports. Engines are imported when they run."""


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def folder(file: Path) -> str:
    """The folder that a file is in; the name of a module that is in none, such as `_input`."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def module_name(file: Path) -> str:
    return ".".join(("jaxpipe", *file.relative_to(PACKAGE).with_suffix("").parts))


def imported(file: Path) -> Iterator[str]:
    """Absolute names of the modules a file imports, and of what it imports from them."""
    package = ("jaxpipe", *file.relative_to(PACKAGE).parts[:-1])
    return imports_in(file.read_text(), module_name(file).removesuffix(".__init__"), package)


def imports_in(text: str, name: str, package: tuple[str, ...]) -> Iterator[str]:
    """The same of the text of a module, also inside functions and by `importlib`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = absolute("." * node.level + (node.module or ""), package)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and is_import(node) and node.args:
            module = literal(node.args[0], name)
            if module is not None:
                yield absolute(module, package)


def absolute(name: str, package: tuple[str, ...]) -> str:
    """The absolute name of a module that is named in a package, with a dot for each level."""
    rest = name.lstrip(".")
    level = len(name) - len(rest)
    base = package[: len(package) - level + 1] if level else ()
    return ".".join((*base, *filter(None, [rest])))


def is_import(call: ast.Call) -> bool:
    return ast.unparse(call.func).split(".")[-1] in ("import_module", "__import__")


def literal(argument: ast.expr, name: str) -> str | None:
    """The text of a literal, which may have `{__name__}` in it; None if it has anything else."""
    if isinstance(argument, ast.JoinedStr):
        texts = [literal(part, name) for part in argument.values]
        return None if None in texts else "".join(filter(None, texts))
    if isinstance(argument, ast.FormattedValue):
        return name if ast.unparse(argument.value) == "__name__" else None
    return str(argument.value) if isinstance(argument, ast.Constant) else None


FOLDER_OF_NAME = {
    name: parts[1]
    for parts, name in (
        (f"jaxpipe.{node.module or alias.name}".split("."), alias.name)
        for node in ast.walk(ast.parse((PACKAGE / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    )
}
"""The folders from which `jaxpipe` itself imports names."""


def arrows(file: Path) -> set[str]:
    """The other packages of jaxpipe that a file imports, also by the names of `jaxpipe` itself."""
    names = {module.split(".")[1] for module in imported(file) if module.startswith("jaxpipe.")}
    named = {FOLDER_OF_NAME.get(name, name) for name in names}
    return named & set(MAY_IMPORT) - {folder(file)}


def behind_doors(file: Path) -> set[str]:
    """The private modules and names of other packages that a file imports."""
    private = set()
    for module in imported(file):
        parts = module.split(".")
        if parts[0] == "jaxpipe" and len(parts) > 2 and parts[1] != folder(file):
            hidden = [i for i, part in enumerate(parts) if i > 1 and part.startswith("_")]
            private.update(".".join(parts[: i + 1]) for i in hidden[:1])
    return private


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_follow_the_arrows_and_no_arrow_is_without_an_import(package: str):
    used = {there for file in files() if folder(file) == package for there in arrows(file)}
    assert used == MAY_IMPORT[package]


def test_no_import_reaches_behind_the_door_of_another_package():
    # Export at a door what other packages use, or move it to the only one that does.
    private = [f"{module_name(file)} -> {name}" for file in files() for name in behind_doors(file)]
    assert not private


def test_modules_that_are_imported_by_name_are_named_by_literals():
    """Other names are not seen: lazy packages, which say them, and modules of users."""
    unseen = {
        file.relative_to(PACKAGE).as_posix()
        for file in files()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and is_import(node)
        if literal(node.args[0], "") is None
    }
    assert unseen == {"_lazy.py", "_input.py"}


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("import jaxpipe.ir.graph", {"jaxpipe.ir.graph"}),
        ("from ..ir._x import y", {"jaxpipe.ir._x", "jaxpipe.ir._x.y"}),
        ("from .. import _compat", {"jaxpipe", "jaxpipe._compat"}),
        ("def f(): from . import x", {"jaxpipe.api", "jaxpipe.api.x"}),
        ("import_module('jaxpipe.ir')", {"jaxpipe.ir"}),
        ("importlib.import_module('..ir', __package__)", {"jaxpipe.ir"}),
        ("importlib.import_module(f'{__name__}.x')", {"jaxpipe.api.x"}),
        ("import_module(name)", set()),
    ],
)
def test_every_way_to_import_is_seen(text: str, modules: set[str]):
    assert set(imports_in(text, "jaxpipe.api", ("jaxpipe", "api"))) == modules


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


def lazy_packages() -> list[str]:
    """The packages whose names are imported at their first use, without `jaxpipe` itself."""
    calls = "__getattr__, __dir__, __all__ = _lazy.names(__name__)"
    lazy = [file for file in files() if file.name == "__init__.py" and calls in file.read_text()]
    return [module_name(file).removesuffix(".__init__") for file in lazy]


@pytest.mark.parametrize("package", lazy_packages())
def test_lazy_packages_have_all_their_names_and_no_other(package: str):
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))
    assert all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError, match=f"module {package!r} has no attribute 'no_such_name'"):
        _ = module.no_such_name


def test_every_folder_stands_in_the_table():
    assert {folder(file) for file in files()} == set(MAY_IMPORT)


@pytest.mark.parametrize(
    "package", ["devices", "schedules", "_durable", "_exit", "_input", "_lazy"]
)
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


def test_the_front_door_imports_engines_and_reports_only_when_they_are_used():
    program = """
import sys, jaxpipe
jaxpipe.pipeline
files = {m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "jaxpipe"}
print(sum(len(open(file).readlines()) for file in files))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert 10_000 < int(done.stdout) <= MAX_CLOSURE_LINES
