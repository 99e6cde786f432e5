"""Lazy packages, whose names are imported at their first use.

`import jaxpipe` would otherwise execute the code of every engine and of every report. A lazy
package has its imports under `if typing.TYPE_CHECKING:`, for readers and type checkers, and then

    else:
        __getattr__, __dir__, __all__ = _lazy.names(__name__)

Python 3.15 says `lazy from ._module import name` instead (PEP 810).
"""

import ast
import importlib
import inspect
import sys
from collections.abc import Callable


def names(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package, from imports in its source."""
    module = sys.modules[package]
    origins = {
        alias.asname or alias.name: ("." * node.level + (node.module or ""), alias.name)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
        if not (alias.asname or alias.name).startswith("_")
    }

    def get(name: str) -> object:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        origin, original = origins[name]
        if origin == ".":  # a module of the package
            return importlib.import_module(f".{original}", package)
        value = getattr(importlib.import_module(origin, package), original)
        setattr(module, name, value)  # the next use finds it without this function
        return value

    def listed() -> list[str]:
        return sorted({*vars(module), *origins} - {"typing"})

    return get, listed, sorted(origins)
