"""Exported functions, and the methods of exported classes, say their arguments and results."""

import importlib
import inspect
import re
from collections.abc import Iterator
from types import FunctionType

import pytest
from docs.test_api import api

DOORS = [package for package in api.packages() if package.count(".") < 2]


def functions(package: str) -> Iterator[tuple[str, FunctionType]]:
    """Yields what a package exports, and its public methods, by name."""
    module = importlib.import_module(package)
    for name in api.exported(package):
        value = inspect.unwrap(getattr(module, name)) if hasattr(module, name) else None
        if isinstance(value, FunctionType):
            yield name, value
        elif isinstance(value, type):
            for method, function in vars(value).items():
                is_method = isinstance(function, FunctionType) and not method.startswith("_")
                if is_method and method == function.__name__:  # not the default of a field
                    yield f"{name}.{method}", inspect.unwrap(function)


@pytest.mark.parametrize("package", DOORS)
def test_arguments_and_results_are_documented_in(package):
    silent = []
    for name, function in functions(package):
        doc = inspect.getdoc(function) or ""
        if "." in name and "Args:" not in doc:  # prose is enough for a method
            continue
        signature = inspect.signature(function)
        names = [n for n in signature.parameters if n != "self" and not n.startswith("_")]
        silent += [f"{name}: {n}" for n in names if not re.search(rf"^ +\*{{0,2}}{n}: ", doc, re.M)]
        returns = signature.return_annotation not in (None, "None", signature.empty)
        if names and returns and not re.search(r"^(Returns|Yields):", doc, re.M):
            silent.append(f"{name}: returns")
    assert not silent
